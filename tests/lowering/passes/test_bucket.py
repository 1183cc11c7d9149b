"""Collectives that do not need each other become one; the numbers stay, on every backend."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.passes import PASSES
from meshdsl.lowering.passes.bucket import bucket
from meshdsl.lowering.passes.overlap import rings
from meshdsl.lowering.passes.prefetch import prefetch
from meshdsl.lowering.passes.tidy import tidy
from meshdsl.lowering.passes.verify import verify
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.lowering.passes.running import run
from tests.property.programs import make_case

APART = Options(bucket_bytes=0)
LAYERS, SIZE = 6, 16
RNG = np.random.default_rng(0)


def mlp(params, data):
    x = data["x"]
    for n in range(LAYERS):
        x = md.einsum(x, params[f"w{n}"], over="hidden").rename(next="hidden")
        x = md.relu(x) if n < LAYERS - 1 else x
    return md.mean(md.square(x - data["y"]))


def init(key):
    hidden, following = md.dims(hidden=SIZE, next=SIZE)
    keys = md.random.split(key, LAYERS)
    return {f"w{n}": md.random.normal(k, [hidden, following]) for n, k in enumerate(keys)}


def step(layout="batch:data", clip_norm=None, options=DEFAULT, mesh="data:4"):
    """Returns the program of one step of Adam on the MLP."""
    optimizer = optim.AdamW(1e-3)
    data = {
        name: md.spec([md.Dimension("batch", 8), md.Dimension("hidden", SIZE)]) for name in "xy"
    }
    train = make_train_step(mlp, optimizer, clip_norm=clip_norm)
    state = spec_of(create(init, optimizer))
    return md.jit(train, mesh, layout, donate="state", options=options).lower(state, data)


def kinds(program):
    return [one.kind for one in program.collectives]


def array(**dims):
    return md.named(RNG.normal(size=tuple(dims.values())), list(md.dims(**dims)))


def test_data_parallel_training_reduces_once():
    program = step()
    (one,) = program.collectives
    assert one.kind == "all_reduce"
    assert one.payload_bytes == 4 + LAYERS * SIZE * SIZE * 4  # the loss and all gradients
    assert len(one.parts) == LAYERS + 1
    assert one.wire_bytes == sum(part.wire_bytes for part in one.parts)
    assert kinds(step(options=APART)) == ["all_reduce"] * (LAYERS + 1)


def test_clipping_by_the_global_norm_needs_no_more():
    assert kinds(step(clip_norm=1.0)) == ["all_reduce"]


def test_optimizer_sharding_scatters_once_and_gathers_once():
    program = step("batch:data; optimizer/hidden:data; gradients/hidden:data")
    large = [c.kind for c in program.collectives if c.payload_bytes > 8]
    assert large == ["reduce_scatter", "all_gather"]


def test_parameter_sharding_gathers_for_both_passes_and_scatters_once():
    layout = "batch:data; params/hidden:data; optimizer/hidden:data; gradients/hidden:data"
    program = step(layout, options=Options(weights="again"))
    large = [c.kind for c in program.collectives if c.payload_bytes > 8]
    assert large == ["all_gather", "all_gather", "reduce_scatter"]


def test_a_bucket_holds_no_more_than_asked_for():
    each = SIZE * SIZE * 4
    for limit in (1, each, 2 * each, 5 * each):
        program = step(options=Options(bucket_bytes=limit))
        assert all(c.payload_bytes <= max(limit, each) for c in program.collectives)
    assert len(step(options=Options(bucket_bytes=2 * each + 4)).collectives) == 3


def test_buckets_keep_to_the_memory_where_they_can():
    def later(x, *weights):
        for w in weights:
            x = md.tanh(md.einsum(x, w, over="hidden").rename(next="hidden"))
        return x

    weights = [array(hidden=64, next=64) for _ in range(4)]
    inputs = (array(batch=8, hidden=64), *weights)
    layout = "batch:data; next:data?"

    def peak(**options):
        program = md.jit(later, "data:4", layout, "numpy", options=Options(**options))
        return program.lower(*inputs)

    apart, whole = peak(bucket_bytes=0), peak()
    assert len(apart.collectives) == 4 and len(whole.collectives) == 1
    assert apart.peak_bytes < whole.peak_bytes
    tight = peak(memory=apart.peak_bytes)
    assert len(tight.collectives) == 4 and tight.peak_bytes == apart.peak_bytes
    middle = peak(memory=(apart.peak_bytes + whole.peak_bytes) // 2)
    assert 1 < len(middle.collectives) < 4
    assert middle.peak_bytes <= (apart.peak_bytes + whole.peak_bytes) // 2


def arrays(tree):
    """Returns the leaves of a tree without the pads that they may be stored with."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, md.NamedArray))


def chain(x):
    a = md.sum(x, "rows")
    b = md.sum(x * md.sum(a), "rows")
    return a, b, md.sum(x * 2.0, "rows")


def test_what_needs_another_is_not_joined_with_it():
    program = md.jit(chain, "data:2", "rows:data", "numpy").lower(array(rows=4, columns=3))
    assert sorted(len(c.parts) for c in program.collectives) == [0, 2]


def test_kinds_dtypes_and_axes_are_kept_apart():
    def function(x, n):
        return (
            md.sum(x, "rows"),
            md.sum(x, "columns"),
            md.max(x, "rows"),
            md.sum(n, "rows"),
            md.sum(x * x, ["rows", "columns"]),
        )

    x, n = array(rows=4, columns=4), md.named(np.arange(4), ["rows"])
    jitted = md.jit(function, "a:2,b:2", "rows:a; columns:b", "numpy")
    program = jitted.lower(x, n)
    assert all(not c.parts for c in program.collectives) and len(program.collectives) == 5


def test_nothing_is_joined_across_the_border_of_a_loop():
    def function(x, w):
        each = md.scan(lambda c, row: (c, md.exp(md.sum(x * row))), md.sum(w), w, "layers")[1]
        return each, md.sum(x)

    x, w = array(rows=4), array(layers=3)
    program = md.jit(function, "data:2", "rows:data", "numpy").lower(x, w)
    assert sorted(c.count for c in program.collectives) == [1, 3]
    assert all(not c.parts for c in program.collectives)


def test_joining_twice_joins_no_more():
    program = step()
    assert bucket(program, DEFAULT) is program


@pytest.mark.filterwarnings("ignore::UserWarning")  # of rules and options that change nothing
def test_what_other_buckets_bring_together_is_joined_too():
    # In this random program a gather may join others only after reductions were joined.
    case = make_case(6718)
    jitted = md.jit(case.function, case.mesh, case.layout, "numpy", options=APART)
    program = rings(tidy(jitted.lower(case.inputs), DEFAULT), smallest=0, intensity=0)
    program = prefetch(bucket(program, DEFAULT))
    for one in PASSES:
        program = one(program, DEFAULT)
    assert bucket(program, DEFAULT) is program


def everything(x, y, z):
    moved = [each.rename(rows="r2", columns="c2") * 1.0 for each in (x, y, z)]
    gathered = [md.sort(each, "rows") for each in (x, y, z)]
    return moved, gathered, [md.max(each, "rows") for each in (x, y, z)]


LAYOUTS = (
    "rows:data; c2:data",
    "rows:data",
    "rows:data; r2:data; columns:model?",
    "columns:data+model; c2:model",
)


@pytest.mark.parametrize("columns", [4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined_collectives_of_every_kind_give_the_same_numbers(layout, columns):
    inputs = [array(rows=8, columns=columns) for _ in range(3)]
    expected = arrays(md.jit(everything, backend="numpy")(*inputs))
    alone = md.jit(everything, "data:2,model:2", layout, "numpy", options=APART).lower(*inputs)
    for backend in ("numpy", "jax"):
        jitted = md.jit(everything, "data:2,model:2", layout, backend)
        program = jitted.lower(*inputs)
        verify(program)
        assert len(program.collectives) < len(alone.collectives)
        assert program.wire_bytes == pytest.approx(alone.wire_bytes)
        for want, found in zip(expected, arrays(jitted(*inputs)), strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


def test_the_layouts_above_join_every_kind_but_permutes():
    inputs = [array(rows=8, columns=4) for _ in range(3)]
    found = set()
    for layout in LAYOUTS:
        program = md.jit(everything, "data:2,model:2", layout, "numpy").lower(*inputs)
        found |= {one.kind for one in program.collectives if one.parts}
    assert {"all_reduce", "all_gather", "all_to_all"} <= found


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_permutes_to_the_same_neighbours_are_one(backend):
    def function(x, y):
        return md.flip(x, "rows"), md.flip(y, "rows")

    inputs = array(rows=4, columns=3), array(rows=4, depth=5)
    jitted = md.jit(function, "data:2", "rows:data", backend)
    (one,) = jitted.lower(*inputs).collectives
    assert (one.kind, one.payload_bytes, len(one.parts)) == ("permute", 2 * (3 + 5) * 8, 2)
    for found, given in zip(jitted(*inputs), inputs, strict=True):
        np.testing.assert_array_equal(np.asarray(found), given.data[::-1])


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_scatters_of_several_dims_are_one(backend):
    def function(x, y):
        return md.sum(x, "rows"), md.sum(y, "rows")

    inputs = array(rows=4, first=6, columns=3), array(rows=4, second=2)
    jitted = md.jit(function, "data:2", "rows:data; first:data?; second:data?", backend)
    program = jitted.lower(*inputs)
    (one,) = program.collectives
    assert (one.kind, len(one.parts)) == ("reduce_scatter", 2)
    (joined,) = (i for i, _ in program.block.walk() if i.is_collective)
    assert joined.params["dims"] == ("first", "second")
    for found, given in zip(jitted(*inputs), inputs, strict=True):
        np.testing.assert_allclose(np.asarray(found), given.data.sum(0), rtol=1e-12)


def test_small_tensors_travel_in_one_buffer_on_cpu_and_large_ones_alone():
    def function(*arrays):
        return [md.sum(each, "rows") for each in arrays]

    inputs = [array(**{"rows": 4, f"columns{n}": n}) for n in (3, 5, 70_000)]
    jitted = md.jit(function, "data:2", "rows:data")
    program = jitted.lower(*inputs)
    (one,) = program.collectives
    assert len(one.parts) == 3
    reduced = [line for line in program.compile().as_text().splitlines() if " all-reduce(" in line]
    text = " ".join(reduced)
    assert "f64[8]" in text and "f64[70000]" in text and "f64[3]" not in text
    for found, given in zip(jitted(*inputs), inputs, strict=True):
        np.testing.assert_allclose(np.asarray(found), given.data.sum(0), rtol=1e-12, atol=1e-12)


def test_many_gathers_of_storage_stand_where_the_first_is_needed():
    def function(x, *weights):
        for w in weights:
            x = md.tanh(md.einsum(x, md.cast(w, "float32"), over="hidden").rename(next="hidden"))
        return x

    weights = [array(hidden=8, next=8) for _ in range(3)]
    x = md.named(RNG.normal(size=(8, 8)).astype("float32"), ["batch", "hidden"])
    jitted = md.jit(function, "data:4", "batch:data; next:data?", "numpy")
    program = jitted.lower(x, *weights)
    ops = [one.op for one in program.block.instructions]
    assert ops.count("all_gather") == 1
    assert ops.index("all_gather") < ops.index("einsum")
    verify(program)
    run(program, jax.tree.leaves((x, *weights)))


def test_collectives_that_differ_in_any_parameter_stay_apart():
    """As of a kind that sends from one device: those of different devices must not be one."""
    program = md.jit(
        lambda x: (md.sum(x, "a"), md.sum(x * x, "a")), "m:2", "a:m", options=APART
    ).lower(md.spec(md.dims(a=4, b=3)))
    assert kinds(bucket(program, DEFAULT)) == ["all_reduce"]
    block, roots = program.block, itertools.count()
    apart = [
        replace(one, params={**one.params, "root": next(roots)}) if one.is_collective else one
        for one in block.instructions
    ]
    program = replace(program, block=replace(block, instructions=tuple(apart)))
    assert kinds(bucket(program, DEFAULT)) == ["all_reduce", "all_reduce"]
