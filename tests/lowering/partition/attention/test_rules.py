"""Attention on shards: what moves, against the fewest bytes that can do."""

import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.lowering.unused import OptionWarning
from tests.ops.agreement import assert_close, random, run

batch, length, memory, heads, group, kv = md.dims(
    batch=8, length=32, memory_length=32, heads=8, group=2, kv=16
)
Q = md.spec([batch, length, heads, group, kv])
K = md.spec([batch, memory, heads, kv])
KEYS = 8 * 32 * 8 * 16 * 4  # bytes of all keys


def lowered(mesh, layout, gradient=False, inputs=(Q, K, K), options=None, **masks):
    def attend(q, k, v):
        return md.attention(q, k, v, **{"causal": True, **masks})

    def loss(q, k, v):
        return md.sum(md.sin(attend(q, k, v)))

    function = (lambda *x: md.grad(loss, (0, 1, 2))(*x)) if gradient else attend
    return md.jit(function, mesh=mesh, layout=layout, options=options).lower(*inputs)


def moved(*args, **kwargs):
    """Returns kind, axes and payload of every collective, of joined ones each."""
    found = lowered(*args, **kwargs).collectives
    parts = [part for one in found for part in one.parts or (one,)]
    return [(c.kind, "+".join(c.axes), c.payload_bytes) for c in parts]


def kinds(*args, **kwargs):
    return {kind for kind, _, _ in moved(*args, **kwargs)}


@pytest.mark.parametrize("layout", ["batch:x; heads:y", "batch:x+y", "heads:x; batch:y"])
def test_what_is_attended_one_by_one_moves_nothing(layout):
    assert moved("x:2,y:4", layout) == []
    assert moved("x:2,y:4", layout, gradient=True) == []


def test_a_split_length_reads_all_keys_and_adds_up_their_gradients():
    inputs = (md.spec([length, kv]), *[md.spec([memory, kv])] * 2)
    layout = "length:x; memory_length:x"
    gathered, summed = ([(kind, "x", 32 * 16 * 4)] * 2 for kind in ("all_gather", "reduce_scatter"))
    gather = Options(context="gather")
    assert moved("x:4", layout, inputs=inputs, options=gather) == gathered
    assert moved("x:4", layout, gradient=True, inputs=inputs) == [*gathered, *summed]


def test_a_query_reads_a_split_memory_where_it_is():
    """As in decoding with a cache: results are merged, and no keys move."""
    long = md.Dimension("memory_length", 4096)
    query, cache = md.spec([batch, kv]), md.spec([batch, long, kv])
    inputs = (query, cache, cache)
    sums, mixed = ("all_reduce", "x", 8 * 4), ("all_reduce", "x", 8 * 16 * 4)
    assert moved("x:4", "memory_length:x", inputs=inputs, causal=False) == [sums, sums, mixed]


@pytest.mark.parametrize("mesh", ["x:1", "x:1,y:2"])
@pytest.mark.parametrize("layout", ["memory_length:x", "length:x; memory_length:x"])
@pytest.mark.parametrize("context", ["auto", "gather", "ring"])
@pytest.mark.filterwarnings("ignore::meshdsl.lowering.unused.OptionWarning")
def test_a_memory_on_an_axis_of_one_device_moves_nothing(mesh, layout, context):
    """Results of parts of the memory are not merged either: there is one part."""
    q, k, v = random([length, kv]), random([memory, kv], seed=1), random([memory, kv], seed=2)

    def attend(q, k, v):
        return md.attention(q, k, v, causal=False)

    def both(q, k, v):
        return attend(q, k, v), md.grad(lambda q: md.sum(md.sin(attend(q, k, v))))(q)

    options = Options(context=context)
    assert moved(mesh, layout, inputs=(q, k, v), options=options, causal=False) == []
    found = run(both, q, k, v, backend="jax", mesh=mesh, layout=layout, options=options)
    for have, want in zip(found, run(both, q, k, v), strict=True):
        assert_close(have, want)


def test_heads_may_take_the_axis_of_split_lengths():
    """Ulysses (Jacobs et al. 2023): queries, keys, values and result change places, once each."""
    there = moved("x:4", "length:x; memory_length:x")
    assert [kind for kind, _, _ in there] == ["all_to_all"] * 4
    assert {size for _, _, size in there} == {KEYS // 4, 2 * KEYS // 4}


def test_a_split_length_with_whole_keys_adds_up_their_gradients_only():
    assert moved("x:4", "length:x") == []
    assert moved("x:4", "length:x", gradient=True) == [("all_reduce", "x", KEYS)] * 2


def test_groups_share_keys_and_add_up_their_gradients():
    assert moved("x:2", "group:x") == []
    assert moved("x:2", "group:x", gradient=True) == [("all_reduce", "x", KEYS)] * 2


def test_split_features_change_places_with_another_dim():
    """All-to-alls there and back, rather than whole queries, keys and values."""
    assert kinds("x:4", "kv:x") == {"all_to_all"}


def test_the_backward_pass_reads_no_scores():
    def loss(q, k, v):
        return md.sum(md.attention(q, k, v))

    graph = md.jit(lambda *x: md.grad(loss, (0, 1, 2))(*x)).trace(Q, K, K)
    scores = {"length", "memory_length"}
    assert not [t for op in graph.operations for t in op.outputs if scores <= {*t.shape.names}]


# What is chosen where an axis splits both the length and the memory.

BOTH = "length:x; memory_length:x"
ONE_HEAD = (md.spec([length, kv]), *[md.spec([memory, kv])] * 2)


def test_a_ring_is_taken_where_it_sends_as_much_as_a_gather():
    assert kinds("x:4", BOTH, inputs=ONE_HEAD) == {"permute"}


def test_what_is_gathered_once_for_both_passes_sends_less_than_two_rings():
    """Beside each other they read the same keys; in bodies of two loops each gathers its own."""

    def loss(q, k, v):
        def block(x, slices):
            return x + md.attention(x, *slices, causal=True), None

        x, _ = md.scan(block, q, (k, v), dim="layers")
        return md.sum(md.sin(x))

    layers = md.Dimension("layers", 3)
    stacked = (md.spec([length, kv]), *[md.spec([layers, memory, kv])] * 2)
    program = md.jit(lambda *x: md.grad(loss, (0, 1, 2))(*x), mesh="x:4", layout=BOTH)
    assert {one.kind for one in program.lower(*stacked).collectives} == {"permute"}
    beside = {"all_gather", "reduce_scatter"}
    assert kinds("x:4", BOTH, gradient=True, inputs=ONE_HEAD) == beside


@pytest.mark.parametrize("gradient", [False, True])
def test_nothing_that_can_be_asked_for_sends_less_than_what_is_taken(gradient):
    for inputs in (ONE_HEAD, (Q, K, K)):
        for mesh in ("x:2", "x:4", "x:8"):
            sent = {
                context: lowered(mesh, BOTH, gradient, inputs, Options(context=context)).wire_bytes
                for context in ("auto", "ring", "gather", "sums")
            }
            assert sent["auto"] <= 1.02 * min(sent.values()), sent


def test_options_say_how_the_memory_is_reached():
    def found(context, layout=BOTH):
        return kinds("x:4", layout, inputs=(Q, K, K), options=Options(context=context))

    assert found("ring") == {"permute"}
    assert found("gather") == {"all_gather"}
    assert "all_reduce" in found("sums")
    assert found("sums", "memory_length:x") == {"all_reduce"}


def test_heads_split_at_the_same_time_stay_split():
    found = moved("x:4,y:2", f"{BOTH}; heads:y", options=Options(context="ring"))
    assert set(found) == {("permute", "x", KEYS // 8)}


def test_a_mask_of_length_and_memory_keeps_keys_from_travelling():
    """It is as large as whole keys, so that a ring would save nothing."""

    def attend(q, k, v, bias):
        return md.attention(q, k, v, bias=bias)

    layout = "length:x; memory_length:x?"
    inputs = (*ONE_HEAD, md.spec([length, memory]))
    program = md.jit(attend, mesh="x:4", layout=layout).lower(*inputs)
    assert {one.kind for one in program.collectives} == {"all_gather"}


@pytest.mark.parametrize(
    ("layout", "options", "told"),
    [
        (
            "length:x",
            Options(context="ring"),
            "context=ring changes nothing: it needs an axis that splits both the length and the "
            "memory of an attention, as in `length:context; memory_length:context`",
        ),
        (
            "length:x",
            Options(context="gather"),
            "context=gather changes nothing: it needs an axis that splits the memory of an "
            "attention, as in `memory_length:context`",
        ),
        (
            "memory_length:x",
            Options(zigzag=True),
            "zigzag changes nothing: it needs a causal attention without a window, of a length to "
            "a memory of the same size, that is computed in a ring (context=ring)",
        ),
    ],
)
def test_options_that_apply_nowhere_are_reported(layout, options, told):
    with pytest.warns(OptionWarning) as warned:
        moved("x:4", layout, options=options)
    assert [str(one.message) for one in warned] == [told]


def test_options_for_attention_say_nothing_of_programs_without_it():
    options = Options(context="ring", zigzag=True)
    md.jit(lambda x: x + 1, mesh="x:4", layout="length:x", options=options).lower(md.spec([length]))


@pytest.mark.parametrize("memory", [64, 1024])
@pytest.mark.parametrize("gradient", [False, True])
def test_over_a_slow_axis_no_other_way_sends_less(memory, gradient):
    batch, length, memory_length = md.dims(batch=2, length=64, memory_length=memory)
    heads, kv, values = md.dims(heads=8, kv=8, values=8)
    specs = [md.spec([batch, length, heads, kv])]
    specs += [md.spec([batch, memory_length, heads, dim]) for dim in (kv, values)]

    def function(q, k, v):
        if not gradient:
            return md.attention(q, k, v)

        def loss(*qkv):
            return md.mean(md.square(md.attention(*qkv)))

        return md.grad(loss, wrt=(0, 1, 2))(q, k, v)

    def sent(context):
        layout, options = "length:s; memory_length:s", Options(context=context)
        return md.jit(function, "s@dcn:4", layout, options=options).lower(*specs).wire_bytes

    assert sent("auto") <= min(map(sent, ("ring", "gather", "sums")))
