"""Attention on shards: what moves, against the fewest bytes that can do."""

import pytest

import meshdsl as md

batch, length, memory, heads, group, kv = md.dims(
    batch=8, length=32, memory_length=32, heads=8, group=2, kv=16
)
Q = md.spec([batch, length, heads, group, kv])
K = md.spec([batch, memory, heads, kv])
KEYS = 8 * 32 * 8 * 16 * 4  # bytes of all keys


def moved(mesh, layout, gradient=False, inputs=(Q, K, K), causal=True):
    def attend(q, k, v):
        return md.attention(q, k, v, causal=causal)

    def loss(q, k, v):
        return md.sum(attend(q, k, v))

    function = (lambda *x: md.grad(loss, (0, 1, 2))(*x)) if gradient else attend
    program = md.jit(function, mesh=mesh, layout=layout).lower(*inputs)
    return [(c.kind, "+".join(c.axes), c.payload_bytes) for c in program.collectives]


@pytest.mark.parametrize("layout", ["batch:x; heads:y", "batch:x+y", "heads:x; batch:y"])
def test_what_is_attended_one_by_one_moves_nothing(layout):
    assert moved("x:2,y:4", layout) == []
    assert moved("x:2,y:4", layout, gradient=True) == []


def test_a_split_length_reads_all_keys_and_adds_up_their_gradients():
    inputs = (md.spec([length, kv]), *[md.spec([memory, kv])] * 2)
    layout = "length:x; memory_length:x"
    gathered, summed = ([(kind, "x", 32 * 16 * 4)] * 2 for kind in ("all_gather", "reduce_scatter"))
    assert moved("x:4", layout, inputs=inputs) == gathered
    assert moved("x:4", layout, gradient=True, inputs=inputs) == [*gathered, *summed]


def test_a_query_reads_a_split_memory_where_it_is():
    """As in decoding with a cache: results are merged, and no keys move."""
    long = md.Dimension("memory_length", 4096)
    query, cache = md.spec([batch, kv]), md.spec([batch, long, kv])
    inputs = (query, cache, cache)
    sums, mixed = ("all_reduce", "x", 8 * 4), ("all_reduce", "x", 8 * 16 * 4)
    assert moved("x:4", "memory_length:x", inputs=inputs, causal=False) == [sums, sums, mixed]


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
    kinds = {kind for kind, _, _ in moved("x:4", "kv:x")}
    assert kinds == {"all_to_all"}


def test_the_backward_pass_reads_no_scores():
    def loss(q, k, v):
        return md.sum(md.attention(q, k, v))

    graph = md.jit(lambda *x: md.grad(loss, (0, 1, 2))(*x)).trace(Q, K, K)
    scores = {"length", "memory_length"}
    assert not [t for op in graph.operations for t in op.outputs if scores <= {*t.shape.names}]
