"""Attention: against its definition, jax.nn.dot_product_attention, and on every layout."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import attention_sizes
from meshdsl.lowering.placement import choosing
from meshdsl.ops.products.attention_reference import attention_reference
from tests.ops.agreement import arrays_of, assert_close, message, random, run

batch, length, memory, heads, group, kv, value = md.dims(
    batch=2, length=6, memory_length=9, heads=2, group=2, kv=4, value=3
)
Q = random([batch, length, heads, group, kv], seed=1)
K = random([batch, memory, heads, kv], seed=2)
V = random([batch, memory, heads, value], seed=3)
ATTEND = ("attention", "attention_gradient")
RNG = np.random.default_rng(0)
BIAS = random([heads, length, memory], seed=4)
SEEN = RNG.random((2, 6, 9)) < 0.6
SEEN[1, 2] = False  # a query that sees nothing
MASK = md.named(SEEN, [batch, length, memory])
SEGMENTS = md.named(RNG.integers(0, 3, (2, 6)).astype(np.int32), [batch, length])
OF_MEMORY = md.named(RNG.integers(0, 2, (2, 9)).astype(np.int32), [batch, memory])
SCATTERED = md.named(np.array([8, 0, 3, -1, 5, 2], np.int32), [length])
ROLLED = md.named(np.roll(np.arange(9, dtype=np.int32), 4), [memory])

VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "queries at the end": {"causal": True, "positions": 3},
    "window": {"window": 2},
    "causal window": {"causal": True, "window": 3, "positions": 3},
    "positions": {"causal": True, "positions": SCATTERED},
    "a rolling memory": {"causal": True, "window": 4, "memory_positions": ROLLED, "positions": 2},
    "segments": {"segments": SEGMENTS, "memory_segments": OF_MEMORY},
    "mask": {"mask": MASK, "causal": True, "positions": 3},
    "bias": {"bias": BIAS, "scale": 0.3},
    "soft cap": {"soft_cap": 0.5, "scale": 2.0, "bias": BIAS, "mask": MASK},
}


def by_definition(q, k, v, causal=False, window=None, positions=0, memory_positions=None, **masks):
    """The weighted mean of what each query sees, in numpy; zeros where it sees nothing."""
    scores = np.einsum("blhgk,bmhk->bhglm", q, k) * masks.get("scale", q.shape[-1] ** -0.5)
    if "soft_cap" in masks:
        scores = masks["soft_cap"] * np.tanh(scores / masks["soft_cap"])
    if "bias" in masks:
        scores = scores + masks["bias"].data[:, None]
    seen = np.ones(scores.shape, bool)
    here = positions + np.arange(q.shape[1]) if isinstance(positions, int) else positions.data
    there = np.arange(k.shape[1]) if memory_positions is None else memory_positions.data
    behind = here[:, None] - there
    if causal:
        seen &= behind >= 0
    if window is not None:
        seen &= abs(behind) < window
    if "segments" in masks:
        same = masks["segments"].data[:, :, None] == masks["memory_segments"].data[:, None]
        seen &= same[:, None, None]
    if "mask" in masks:
        seen &= masks["mask"].data[:, None, None]
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhglm,bmhk->blhgk", weights / np.where(total == 0, 1, total), v)


def gradients(function, **options):
    """Returns a function giving the result and its gradients by everything of floats."""
    weights = random([batch, length, heads, group, value], seed=5)

    def loss(q, k, v, bias):
        given = {**options, "bias": bias} if "bias" in options else options
        result = function(q, k, v, **given)
        return md.sum(result * weights), result

    def both(q, k, v, bias):
        (_, result), found = md.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)
        return result, found

    return both


@pytest.fixture(params=[16, 32])
def small_blocks(monkeypatch, request):
    """Blocks of 4 x 4 scores, of one or two heads, so that small problems are many blocks."""
    monkeypatch.setattr(attention_sizes, "DIRECT", 1)
    monkeypatch.setattr(attention_sizes, "BLOCK", request.param)
    monkeypatch.setattr(attention_sizes, "SHORTEST", 4)
    monkeypatch.setattr(attention_sizes, "LONGEST", 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_result_is_that_of_the_definition(variant):
    options = VARIANTS[variant]
    expected = by_definition(Q.data, K.data, V.data, **options)
    for function in (md.attention, attention_reference):
        found = run(lambda q, k, v, f=function: f(q, k, v, **options), Q, K, V)
        assert found.dims.names == ("batch", "length", "heads", "group", "value")
        assert_close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_reference(variant, backend):
    options = VARIANTS[variant]
    expected = run(gradients(attention_reference, **options), Q, K, V, BIAS)
    found = run(gradients(md.attention, **options), Q, K, V, BIAS, backend=backend)
    for mine, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert_close(mine, other)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tf"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_blocks_everything_is_the_same(variant, backend, small_blocks):
    options = VARIANTS[variant]
    expected = run(gradients(attention_reference, **options), Q, K, V, BIAS)
    found = run(gradients(md.attention, **options), Q, K, V, BIAS, backend=backend)
    for mine, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("backend", ["jax", "tf"])
def test_any_dim_that_keys_and_values_share_is_divided(backend, monkeypatch):
    """Also a later one while an earlier one is not; a bias without it has the sum as gradient."""
    monkeypatch.setattr(attention_sizes, "DIRECT", 1)
    monkeypatch.setattr(attention_sizes, "BLOCK", 2 * 6 * 9)
    sizes = md.dims(batch=2, heads=3, group=1)
    q = random([sizes[0], length, *sizes[1:], kv], seed=1)
    k, v = (random([sizes[0], memory, sizes[1], d], seed=d.size) for d in (kv, value))
    bias = random([length, memory], seed=4)

    def both(q, k, v, bias):
        return md.value_and_grad(
            lambda *x: md.sum(md.square(md.attention(*x[:3], bias=x[3]))), (0, 1, 2, 3)
        )(q, k, v, bias)

    blocks = lead_blocks(both, q, k, v, bias)
    assert set(blocks) == {(2, 1, 1)}  # 3 has no divisor 2
    expected = run(both, q, k, v, bias, backend="numpy")
    found = run(both, q, k, v, bias, backend=backend)
    for mine, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert_close(mine, other)


def lead_blocks(function, *arguments):
    """Returns the batches and heads of the blocks of each attention in a program."""
    program = md.jit(function).lower(*arguments).block.walk()
    sizes = [attention_sizes.AttentionSizes.of(i) for i, _ in program if i.op in ATTEND]
    return [each.lead_block.sizes for each in sizes]


@pytest.mark.parametrize(
    ("sizes", "lead", "block"),
    [
        ((16, 8, 4, 8192, 131072), (16, 8, 4), ((1, 4, 4), 512, 512)),  # a long context
        ((64, 12, 1, 512, 512), (64, 12, 1), ((1, 12, 1), 512, 512)),
        ((256, 16, 1, 128, 128), (256, 16, 1), ((16, 16, 1), 128, 128)),
        ((37, 1, 128, 1024, 1024), (37, 1, 128), ((1, 1, 128), 64, 512)),  # heads of one key
        ((2, 2, 2, 1024, 1024), (2, 2, 2), ((2, 2, 2), 1024, 1024)),  # few: at once
        ((1, 1, 1, 4096, 4096), (1, 1, 1), ((1, 1, 1), 512, 512)),
        ((32, 16, 1, 577, 577), (32, 16, 1), ((2, 16, 1), 296, 296)),  # few pads
        ((512, 32, 1, 1, 8192), (512, 32, 1), ((256, 32, 1), 1, 512)),  # one query
        ((2063, 1, 1, 64, 64), (2063, 1, 1), ((2063, 1, 1), 64, 64)),  # a large prime
    ],
)
def test_blocks_are_long_before_they_have_many_heads(sizes, lead, block):
    names = ("batch", "heads", "group", "length", "memory_length")
    b, h, g, rows, columns = map(md.Dimension, names, sizes)
    q = md.spec([b, rows, h, g, kv], "bfloat16")
    k, v = md.spec([b, columns, h, kv], "bfloat16"), md.spec([b, columns, h, value], "bfloat16")
    program = md.jit(md.attention).lower(q, k, v)
    (one,) = [i for i, _ in program.block.walk() if i.op == "attention"]
    of_all = attention_sizes.AttentionSizes.of(one)
    assert of_all.lead.sizes == lead
    assert (of_all.lead_block.sizes, *of_all.blocks) == block
    assert of_all.block.volume <= 1.01 * attention_sizes.DIRECT
    part = of_all
    while part.divided is not None:
        part = part.part(part.divided)
    assert part.block == of_all.block  # a part has the blocks of all


@pytest.mark.parametrize("backend", ["jax", "tf"])
def test_rows_that_fill_up_a_block_have_no_weight_however_large_the_bias(backend, small_blocks):
    bias = md.named(np.full((memory.size,), 1000.0), [memory])
    function = gradients(md.attention, bias=bias)
    expected = run(gradients(attention_reference, bias=bias), Q, K, V, bias)
    for mine, other in zip(
        arrays_of(run(function, Q, K, V, bias, backend=backend)), arrays_of(expected), strict=True
    ):
        assert_close(mine, other)


LAYOUTS = [
    ("x:2,y:2", "batch:x; heads:y"),
    ("x:2,y:2", "length:x; group:y"),
    ("x:4", "length:x; memory_length:x?"),
    ("x:2,y:2", "memory_length:x+y"),
    ("x:3,y:2", "memory_length:x; length:y"),
    ("x:2,y:2", "kv:x; value:y"),
    ("x:3,y:2", "heads:x; value:y"),
    ("x:4", "batch:x"),
]
PLACED = list(zip(LAYOUTS * 2, itertools.cycle(VARIANTS), strict=False))


@pytest.fixture
def garbage_in_pads(monkeypatch):
    """Pads are cut full of NaN, and of numbers that are out of place."""
    pad, values = np.pad, {"f": np.nan, "i": -77, "b": True}
    monkeypatch.setattr(
        np, "pad", lambda a, widths: pad(a, widths, constant_values=values[a.dtype.kind])
    )


@pytest.mark.parametrize(("where", "variant"), PLACED)
def test_every_layout_gives_the_same(where, variant, garbage_in_pads):
    """Sizes that do not divide, and empty shards, included."""
    (mesh, layout), options = where, VARIANTS[variant]
    expected = run(gradients(md.attention, **options), Q, K, V, BIAS)
    found = run(gradients(md.attention, **options), Q, K, V, BIAS, mesh=mesh, layout=layout)
    for mine, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert_close(mine, other)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("where", [("x:4", "length:x; memory_length:x?"), LAYOUTS[4]])
def test_rings_and_parts_of_the_memory_in_small_blocks(where, variant, small_blocks):
    (mesh, layout), options = where, VARIANTS[variant]
    expected = run(gradients(attention_reference, **options), Q, K, V, BIAS)
    where = {"mesh": mesh, "layout": layout, "backend": "jax"}
    found = run(gradients(md.attention, **options), Q, K, V, BIAS, **where)
    for mine, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert_close(mine, other)


@pytest.fixture
def dear_flops(monkeypatch):
    """Whatever can be split is: flops count more than bytes on the wire."""
    monkeypatch.setattr(choosing, "FLOPS_PER_WIRE_BYTE", 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_the_memory_are_merged(variant, dear_flops):
    both = gradients(md.attention, **VARIANTS[variant])
    expected = run(both, Q, K, V, BIAS)
    split = md.jit(both, mesh="x:9", layout="memory_length:x", backend="numpy")
    local = [
        i.inputs[1].local for i, _ in split.lower(Q, K, V, BIAS).block.walk() if i.op in ATTEND
    ]
    assert [shape.get("memory_length").size for shape in local] == [1, 1]
    for mine, other in zip(arrays_of(split(Q, K, V, BIAS)), arrays_of(expected), strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("variant", ["causal window", "soft cap"])
def test_jax_gives_the_same_on_a_mesh(variant, small_blocks):
    options = VARIANTS[variant]
    expected = run(gradients(md.attention, **options), Q, K, V, BIAS)
    where = {"mesh": "x:4,y:2", "layout": "length:x; heads:y", "backend": "jax"}
    found = run(gradients(md.attention, **options), Q, K, V, BIAS, **where)
    for mine, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert_close(mine, other)


@pytest.mark.long
@pytest.mark.parametrize("causal", [False, True])
def test_jax_nn_agrees(causal):
    """To the precision of its softmax, float32."""
    bias = random([heads, group, length, memory], seed=6)
    window = 2 if causal else None

    def theirs(q, k, v, bias):
        q, bias = q.reshape(2, 6, 4, 4), bias.reshape(1, 4, 6, 9)
        size = None if window is None else (window - 1, 0)
        found = jax.nn.dot_product_attention(
            q, k, v, bias, is_causal=causal, local_window_size=size
        )
        return found.reshape(2, 6, 2, 2, 4)

    square = random([batch, memory, heads, kv], seed=8)
    arrays = [a.data for a in (Q, K, square, bias)]
    expected, pull = jax.vjp(theirs, *arrays)

    def ours(q, k, v, bias):
        return md.attention(q, k, v, causal=causal, window=window, bias=bias)

    assert_close(run(ours, Q, K, square, bias), expected, 1e-6)
    weights = random(Q.dims, seed=5)
    gradient = md.grad(lambda *x: md.sum(ours(*x) * weights), (0, 1, 2, 3))
    for mine, other in zip(run(gradient, Q, K, square, bias), pull(weights.data), strict=True):
        assert_close(mine, other, 1e-6)


def test_second_derivatives_are_those_of_the_reference():
    def second(function):
        def first(q, k, v):
            found = md.grad(
                lambda q, k, v: md.sum(md.sin(function(q, k, v, causal=True, positions=3))),
                (0, 1, 2),
            )(q, k, v)
            return sum((md.sum(md.square(g)) for g in found), 0.0)

        return lambda q, k, v: md.grad(first, (0, 1, 2))(q, k, v)

    expected = run(second(attention_reference), Q, K, V)
    for mine, other in zip(run(second(md.attention), Q, K, V), expected, strict=True):
        assert_close(mine, other)


def test_keys_and_values_may_lack_heads():
    def attend(q, k, v):
        return md.attention(q, k, v, over="memory_length")

    k, v = random([batch, memory, kv], seed=2), random([memory, heads, value], seed=3)
    found = run(gradients(md.attention), Q, k, v, BIAS, backend="jax")
    expected = run(gradients(attention_reference), Q, k, v, BIAS)
    for mine, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        assert_close(mine, other)
    split = run(gradients(md.attention), Q, k, v, BIAS, mesh="x:2,y:2", layout="heads:x; batch:y")
    for mine, other in zip(arrays_of(split), arrays_of(expected), strict=True):
        assert_close(mine, other)


def test_one_query_needs_no_length():
    q = random([batch, heads, kv], seed=1)
    found = run(lambda q, k, v: md.attention(q, k, v), q, K, V, backend="jax")
    expected = by_definition(q.data[:, None, :, None], K.data, V.data)[:, 0, :, 0]
    assert_close(found, expected)


def test_segments_of_the_memory_are_those_of_the_queries_by_default():
    k, v = (random([batch, md.Dimension("memory_length", 6), heads, kv], seed=s) for s in (2, 3))
    found = run(lambda q, k, v: md.attention(q, k, v, segments=SEGMENTS), Q, k, v)
    again = md.named(SEGMENTS.data, ["batch", "memory_length"])
    options = {"segments": SEGMENTS, "memory_segments": again}
    assert_close(found, by_definition(Q.data, k.data, v.data, **options))


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient():
    for hidden in (-np.inf, -1e30):
        bias = np.zeros((6, 9))
        bias[4] = hidden
        options = {"bias": md.named(bias, [length, memory])}
        for backend in ("numpy", "jax"):
            result, found = run(
                gradients(md.attention, **options), Q, K, V, options["bias"], backend=backend
            )
            assert not np.asarray(result)[:, 4].any()
            assert not np.asarray(found[0])[:, 4].any()
            assert all(np.isfinite(np.asarray(g)).all() for g in found)


def test_large_scores_do_not_overflow():
    big = md.named(1e4 * Q.data, Q.dims)
    assert np.isfinite(run(lambda q, k, v: md.attention(q, k, v), big, K, V, backend="jax")).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_half_precision_is_summed_in_float32(dtype):
    arrays = [md.named(jnp.asarray(a.data, dtype), a.dims) for a in (Q, K, V)]
    exact = by_definition(*(np.asarray(a.data, np.float64) for a in arrays))
    for backend in ("numpy", "jax"):
        found = run(lambda q, k, v: md.attention(q, k, v), *arrays, backend=backend)
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - exact).max()
        assert error <= (4e-3 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("window", [None, 256])
def test_memory_grows_linearly_with_the_length(window):
    """Both as XLA accounts for it and as the program does; nothing is run."""

    def temporary(size):
        length, memory, heads, kv = md.dims(length=size, memory_length=size, heads=2, kv=16)
        q, k = md.spec([length, heads, kv]), md.spec([memory, heads, kv])

        def loss(q, k, v):
            return md.sum(md.square(md.attention(q, k, v, causal=True, window=window)))

        program = md.jit(lambda q, k, v: md.grad(loss, (0, 1, 2))(q, k, v)).lower(q, k, k)
        measured = program.compile().executable.memory_analysis()
        return np.array([measured.temp_size_in_bytes, program.peak_bytes])

    short, long = temporary(4096), temporary(16384)
    assert (long < 4.1 * short).all()
    assert (long < 2 * 16384**2).all()  # a quarter of one matrix of scores


def test_flops_count_every_product_of_scores():
    q, k = md.spec(Q.dims), md.spec(K.dims)
    program = md.jit(lambda q, k, v: md.attention(q, k, v)).lower(q, k, md.spec(V.dims))
    assert program.flops == 2 * (2 * 6 * 2 * 2) * 9 * (4 + 3)


def test_mistakes_are_told():
    def told(*inputs, **options):
        return message(lambda q, k, v: md.attention(q, k, v, **options), *(inputs or (Q, K, V)))

    assert "attention: no dim `memory` in" in told(over="memory")
    assert "the keys have dims [heads=2] that the queries" in told(
        random([batch, length, kv]), K, V
    )
    assert "need one floating-point dtype, got f64, f64, s32" in told(
        Q, K, md.named(np.zeros((2, 9, 2, 3), np.int32), V.dims)
    )
    assert "rename it in keys and values, as in k.rename(length='memory_length')" in told(
        Q, random([batch, length, heads, kv]), random([batch, length, heads, kv]), over="length"
    )
    assert "dim `heads` has size 2 in" in told(
        Q, random([batch, memory, md.Dimension("heads", 3), kv]), V
    )
    assert "a window is a number of positions, at least 1; got 0" in told(window=0)
    assert "soft_cap must be positive, got -1" in told(soft_cap=-1.0)
    assert "`mask` must be bool, got" in told(mask=BIAS)
    assert "`bias` must be floating-point numbers, got" in told(bias=MASK)
    assert "`segments` must be integers, got" in told(segments=BIAS, memory_segments=OF_MEMORY)
    assert "`bias` has dims [value=3] that are not among" in told(bias=random([value]))
    assert "`positions` has dims [memory_length=9]" in told(causal=True, positions=ROLLED)
    assert "memory_segments need the segments of the queries" in told(memory_segments=OF_MEMORY)
    assert "with length=6 and memory_length=9, the memory needs memory_segments" in told(
        segments=SEGMENTS
    )
    assert "no dim `len` in" in told(causal=True, length="len")


def test_queries_without_the_features_are_told_what_names_them():
    q, k = random(md.dims(length=2, dim=3)), random(md.dims(memory_length=4, dim=3))
    text = message(lambda q, k: md.attention(q, k, k, over="memory_length"), q, k)
    assert (
        "[length=2, dim=3] have no dim `kv` to contract with the keys; features= names it" in text
    )
