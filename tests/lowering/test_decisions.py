"""Where the hardware is known, time decides: what is faster by simulation and fits stays."""

import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.lowering.decisions import fastest, small_bytes
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.verify import verify


def residual(width=4096, depth=8, rows=16384, **options):
    """Returns a step of tensor parallel layers, whose sums every layer waits for."""
    batch, features, hidden = md.dims(batch=rows, features=width, hidden=2 * width)
    stack = md.Dimension("layers", depth)

    def layer(x, w):
        h = md.relu(md.einsum(x, w["up"], over="features"))
        return x + md.einsum(h, w["down"], over="hidden"), None

    def loss(w, x):
        y, _ = md.scan(md.checkpoint(layer), x, w, dim="layers")
        return md.mean(md.square(y))

    layout = "batch:data; hidden:model; w/features:data"
    f = md.jit(md.grad(loss), "data:4,model:4", layout, options=Options(**options))
    w = {
        "up": md.spec([stack, features, hidden], "bfloat16"),
        "down": md.spec([stack, hidden, features], "bfloat16"),
    }
    return f.lower(w, md.spec([batch, features], "bfloat16"))


def decided(program):
    return {(one.name, one.chosen.name) for one in program.decisions}


def seconds(program):
    return simulate(program, hardware("v5p")).seconds


def test_without_hardware_nothing_is_decided_by_time():
    assert residual().decisions == ()


def test_changes_that_are_faster_by_simulation_stay():
    usual, fast = residual(), residual(hardware="v5p")
    verify(fast)
    # No collective is joined here, so nothing is decided about that.
    assert decided(fast) == {("weights", "gathered again"), ("halves", "batch")}
    assert seconds(fast) < 0.92 * seconds(usual)


def test_each_decision_tells_what_the_other_way_costs_from_the_program_that_is_chosen():
    fast = residual(hardware="v5p")
    for one in fast.decisions:
        assert one.chosen.seconds == pytest.approx(seconds(fast))
        assert not one.fits or 0.99 * one.chosen.seconds <= one.other.seconds
    (halves, *_) = [one for one in fast.decisions if one.name == "halves"]
    (weights,) = [one for one in fast.decisions if one.name == "weights"]
    whole = residual(hardware="v5p", halves="none", weights="again")
    assert halves.other.seconds <= seconds(whole) * 1.0001
    kept = residual(hardware="v5p", halves="batch", weights="keep")
    assert weights.other.seconds == pytest.approx(seconds(kept))


def plain(rows=2**15, dtype="float32", **options):
    """Returns the gradients of layers that every device has: only they are sent."""
    batch, features, hidden = md.dims(batch=rows, features=1024, hidden=4096)
    stack = md.Dimension("layers", 4)

    def layer(x, w):
        h = md.relu(md.einsum(x, w["up"], over="features"))
        return x + md.einsum(h, w["down"], over="hidden"), None

    def loss(w, x):
        return md.mean(md.square(md.scan(layer, x, w, dim="layers")[0]))

    f = md.jit(md.grad(loss), "data:8", "batch:data", options=Options(**options))
    w = {
        "up": md.spec([stack, features, hidden], dtype),
        "down": md.spec([stack, hidden, features], dtype),
    }
    return f.lower(w, md.spec([batch, features], dtype))


def test_gradients_are_reduced_in_the_loop_beside_the_layers_before():
    usual, fast = plain(), plain(hardware="v5p")
    verify(fast)
    assert [one.count for one in usual.collectives] == [1]
    assert ("collectives", "apart") in decided(fast)
    assert [one.count for one in fast.collectives] == [4, 4]
    assert fast.wire_bytes == pytest.approx(usual.wire_bytes)
    assert seconds(fast) < 0.95 * seconds(usual)


def test_where_collectives_are_waited_for_they_stay_joined_after_the_loop():
    assert not hardware("v4").asynchronous & {"all_reduce"}
    assert [one.count for one in plain(hardware="v4").collectives] == [1]


def test_small_collectives_are_joined_whatever_is_faster():
    v5p = hardware("v5p")
    small = small_bytes(v5p, md.Mesh.parse("data:8"))
    assert v5p.seconds("all_reduce", small / 4, ["data"], md.Mesh.parse("data:8")) == pytest.approx(
        v5p.seconds("all_reduce", 1, ["data"], md.Mesh.parse("data:8"))
    )
    assert small < 2**23
    # The gradients of norms and biases are thousands of times smaller, those of weights larger.


def test_small_products_are_not_halved():
    small = residual(width=128, depth=2, rows=64, hardware="v5p")
    assert "batch" not in {one.chosen.name for one in small.decisions}


def test_what_leaves_too_little_memory_is_not_taken():
    usual = residual()
    limit = int(usual.peak_bytes * 1.05)
    limited = residual(hardware="v5p", memory=limit)
    (weights,) = [one for one in limited.decisions if one.name == "weights"]
    assert weights.chosen.name == "gathered again"
    assert not weights.fits
    assert weights.other.peak_bytes > limit
    assert limited.peak_bytes <= limit


def test_a_given_choice_is_not_changed():
    given = {"bucket_bytes": 2**40, "prefetch": False, "halves": "none"}
    again = residual(hardware="v5p", weights="again", **given)
    assert again.decisions == ()
    assert again.wire_bytes == residual(weights="again").wire_bytes
    forced = residual(halves="batch")
    assert forced.decisions == ()
    assert len(forced.collectives) > len(residual().collectives)


def attending(length, **options):
    """Returns the gradients of a causal attention whose memory is split, and nothing else is."""
    batch, dims = md.Dimension("batch", 2), md.dims(heads=1, length=length, kv=128)
    where = {"length": "length", "features": "kv", "causal": True}

    def loss(qkv):
        q, k, v = qkv[0], *(each.rename(length="memory_length") for each in qkv[1:])
        return md.sum(md.cast(md.attention(q, k, v, over="memory_length", **where), "float32"))

    layout = "batch:data; length:context; memory_length:context"
    f = md.jit(md.grad(loss), "data:2,context:4", layout, options=Options(**options))
    return f.lower((md.spec([batch, *dims], "bfloat16"),) * 3)


def test_a_memory_goes_around_a_ring_where_that_is_faster_than_fewest_bytes():
    fast, usual = attending(2**15, hardware="v5p"), attending(2**15)
    verify(fast)
    ways = {one.other.name: one for one in fast.decisions if one.name == "context"}
    assert {one.chosen.name for one in ways.values()} == {"ring"}
    assert ways.keys() == {"fewest bytes", "gather", "sums"}
    assert seconds(fast) < 0.95 * seconds(usual)
    ring = attending(2**15, hardware="v5p", context="ring")
    assert "context" not in {one.name for one in ring.decisions}  # it was given
    assert seconds(ring) == pytest.approx(seconds(fast))
    short = attending(2**10, hardware="v5p")
    assert {one.chosen.name for one in short.decisions if one.name == "context"} == {"fewest bytes"}


def test_attention_whose_memory_is_not_split_has_one_way():
    assert "context" not in {one.name for one in residual(hardware="v5p").decisions}


def test_the_fastest_way_that_fits_is_taken_and_the_others_are_priced():
    kept, again = residual(), residual(weights="keep")
    programs, v5p = {"again": kept, "keep": again}, hardware("v5p")
    less, more = sorted(programs, key=lambda way: programs[way].peak_bytes)
    quick = min(programs, key=lambda way: seconds(programs[way]))
    name, (decision,) = fastest("weights", programs, v5p)
    equal = seconds(programs[less]) < 1.01 * seconds(programs[quick])
    assert name == (less if equal else quick)
    assert decision.fits and (decision.name, decision.chosen.name) == ("weights", name)
    assert decision.other.seconds == pytest.approx(seconds(programs[decision.other.name]))
    limit = programs[less].peak_bytes
    name, (decision,) = fastest("weights", programs, v5p, limit)
    assert name == less and not decision.fits and decision.other.name == more
    assert fastest("weights", programs, v5p, 1)[0] == less  # none fits


def test_halves_of_an_unknown_dim_are_an_error():
    message = r"halves=bacth: the program has no such dim, but batch, .* Did you mean `batch`\?"
    with pytest.raises(ValueError, match=message):
        residual(halves="bacth")


def test_hardware_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match=r"unknown hardware 'v5q'; choose one of .*v5p"):
        Options(hardware="v5q")
    with pytest.raises(ValueError, match="halves is auto, none or the name of a dim, not 'a b'"):
        Options(halves="a b")
