"""Partial sums of half precision: what each device holds, what is sent, and what is right."""

import ml_dtypes
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from tests.ops.agreement import assert_close

pytestmark = pytest.mark.optimized  # it is about rounding

MESH, FOUR = "a:2", np.array([4e4, 4e4, -4e4, -4e4])
IN_FLOAT32, IN_THE_SAME = Options(reduce_dtype="float32"), Options(reduce_dtype="same")
BACKENDS = ["numpy", "jax"]


def row(data=FOUR, dtype="float16", dims=("x",)):
    return md.named(np.asarray(data).astype(dtype), list(dims))


def sends(function, *inputs, options=None, mesh=MESH, layout="x:a"):
    """Returns the dtype and the payload of every collective that adds up."""
    program = md.jit(function, mesh, layout, options=options).lower(*inputs)
    found = []
    for instruction, _ in program.block.walk():
        if instruction.op in ("all_reduce", "reduce_scatter"):
            found += [(v.dtype.name, v.bytes) for v in instruction.inputs]
    return found


ONES = row(np.ones(4))
PAIRS = row(np.stack([FOUR, FOUR]), dims=["y", "x"])
FILTER = row(np.ones((4, 1)), dims=["x", "w"])
PICTURE = row(np.stack([FOUR, FOUR]), dims=["width", "x"])
SEGMENT = md.named(np.zeros(4, np.int32), ["x"])

# A function, and its inputs; every sum is 0, and its halves are 8e4 and -8e4.
SUMS = {
    "sum": (lambda x: md.sum(x), (row(),)),
    "mean": (lambda x: md.mean(x), (row(),)),
    "einsum": (lambda x, y: md.einsum(x, y, over="x"), (row(), ONES)),
    "matrix product": (lambda x, y: md.einsum(x, y, over="x"), (PAIRS, ONES)),
    "convolution": (
        lambda x, f: md.conv(x, f, {"width": "w"}, in_dim="x"),
        (PICTURE, FILTER),
    ),
    "segment_sum": (
        lambda x, s: md.segment_sum(x, s, md.Dimension("segment", 2), "x"),
        (row(), SEGMENT),
    ),
    "scatter": (
        lambda x, s: md.scatter(row(np.zeros(2), dims=["to"]), s, x, "to", "add"),
        (row(), SEGMENT),
    ),
    "gradient": (
        lambda x, y: md.grad(lambda y: md.sum(md.cast(x * md.cast(y, "float16"), "float32")))(y),
        (row(), md.named(np.zeros((), np.float32), [])),
    ),
    "linear in a sum": (
        lambda x: md.sum(-(md.einsum(x, ONES, over="x") * 0.5) + 1),
        (PAIRS,),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_right_whose_parts_overflow(name, backend):
    function, inputs = SUMS[name]
    alone = md.jit(function, backend=backend)(*inputs)
    split = md.jit(function, MESH, "x:a", backend=backend)(*inputs)
    assert np.isfinite(np.asarray(alone)).all()
    assert split.dtype == alone.dtype
    assert_close(np.asarray(split, np.float64), np.asarray(alone, np.float64), 1e-3)


def test_tensorflow_adds_up_as_wide():
    """All of them in one program."""
    inputs = [inputs for _, inputs in SUMS.values()]

    def every(*inputs):
        return [f(*own) for (f, _), own in zip(SUMS.values(), inputs, strict=True)]

    for found in md.jit(every, MESH, "x:a", backend="tf")(*inputs):
        assert np.isfinite(np.asarray(found)).all()


def test_float16_is_sent_as_float32():
    assert sends(lambda x: md.sum(x, "x"), PAIRS) == [("float32", 8)]


def test_float16_is_sent_as_it_is_if_asked_for():
    assert sends(lambda x: md.sum(x, "x"), PAIRS, options=IN_THE_SAME) == [("float16", 4)]


def test_bfloat16_is_sent_as_it_is_unless_asked_for():
    x = row(np.ones((2, 4)), "bfloat16", ["y", "x"])
    assert sends(lambda x: md.sum(x, "x"), x) == [("bfloat16", 4)]
    assert sends(lambda x: md.sum(x, "x"), x, options=IN_FLOAT32) == [("float32", 8)]


def test_what_picks_one_element_is_sent_as_it_is():
    assert sends(lambda x: md.index(x, "x", 1), PAIRS) == [("float16", 4)]


def test_sums_that_are_added_up_are_reduced_once():
    def model(x, y):
        return md.einsum(x, y, over="x") + md.einsum(x, md.sin(y), over="x")

    assert sends(model, PAIRS, ONES) == [("float32", 8)]


def test_gradients_in_float32_stay_partial_across_a_loop():
    """Weights in float32, products in float16: one reduction of all layers behind the loop."""
    layers, batch, embed = md.dims(layers=3, batch=4, embed=2)

    def loss(w, x):
        def layer(h, w):
            return md.einsum(h, md.cast(w, "float16"), over="embed").rename({"to": "embed"}), None

        h, _ = md.scan(layer, x, w, dim="layers")
        return md.sum(md.cast(h, "float32"))

    w = md.named(np.ones((3, 2, 2), np.float32), [layers, embed, md.Dimension("to", 2)])
    x = md.named(np.ones((4, 2), np.float16), [batch, embed])
    program = md.jit(md.grad(loss), "a:2", "batch:a").lower(w, x)
    found = [(c.kind, c.count, c.dims.names) for c in program.collectives]
    assert found == [("all_reduce", 1, ("layers", "embed", "to"))]


def test_more_digits_in_bfloat16():
    """On four devices, against the sum in float64 of numbers rounded to bfloat16."""
    x = np.random.default_rng(0).uniform(0, 1, (4096, 8)).astype(ml_dtypes.bfloat16)
    exact = x.astype(np.float64).sum(0)

    def error(options):
        f = md.jit(lambda x: md.sum(x, "x"), "a:4", "x:a", "numpy", options=options)
        found = np.asarray(f(md.named(x, ["x", "y"]))).astype(np.float64)
        return np.abs(found - exact).max()

    spacing = 16  # of bfloat16 numbers from 2,048 to 4,096
    assert error(IN_FLOAT32) <= spacing / 2 < error(None)


@pytest.mark.parametrize("layout", ["features:m", "tokens:m"])
def test_grouped_products_are_reduced_in_float32(layout):
    tokens, features, experts, out = md.dims(tokens=16, features=16, experts=4, out=8)
    specs = (
        md.spec([tokens, features], "bfloat16"),
        md.spec([experts, features, out], "bfloat16"),
        md.spec([tokens], "int32"),
    )

    def function(x, w, group):
        def product(w):
            return md.grouped_einsum(x, w, group, "experts", over="features")

        return product(w), md.grad(lambda w: md.sum(md.cast(product(w), "float32")))(w)

    options = Options(reduce_dtype="float32")
    program = md.jit(function, "m:4", layout, options=options).lower(*specs)
    sent = [one.inputs[0].dtype for one, _ in program.block.walk() if one.is_collective]
    assert sent and {*sent} == {np.dtype("float32")}


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_a_grouped_product_whose_parts_are_too_large_is_that_of_one_device(backend):
    x = md.named(np.array([[4e4, 4e4, -4e4, -4e4]] * 2, np.float16), ["tokens", "features"])
    w = md.named(np.ones((3, 4, 2), np.float16), ["experts", "features", "out"])
    group = md.named(np.array([0, 2], np.int32), ["tokens"])

    def function(x, w, group):
        return md.grouped_einsum(x, w, group, "experts", over="features")

    found = md.jit(function, "m:2", "features:m", backend)(x, w, group)
    np.testing.assert_array_equal(found, np.zeros((2, 2)))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_gradients_of_attention_whose_parts_are_too_large_are_those_of_one_device(backend):
    q, k = (
        row(np.zeros((16, 2)), dims=["length", "kv"]),
        row(np.zeros((4, 2)), dims=["memory", "kv"]),
    )
    v = row(np.ones((4, 2)), dims=["memory", "out"])
    factor = row(np.repeat([6e4, -6e4], 8)[:, None] * np.ones((1, 2)), dims=["length", "out"])

    def function(q, k, v, factor):
        def loss(v):
            attended = md.attention(q, k, v, over="memory")
            return md.sum(md.cast(attended * factor, "float32"))

        return md.grad(loss)(v)

    found = md.jit(function, "a:2", "length:a", backend)(q, k, v, factor)
    np.testing.assert_array_equal(found, np.zeros((4, 2)))


def test_gradients_of_attention_are_reduced_in_float32():
    shapes = [("length", 16, "kv", 2), ("memory", 4, "kv", 2), ("memory", 4, "out", 2)]
    specs = [md.spec(md.dims(**{a: b, c: d}), "bfloat16") for a, b, c, d in shapes]

    def function(q, k, v):
        def loss(*qkv):
            attended = md.attention(*qkv, over="memory")
            return md.sum(md.cast(attended, "float32"))

        return md.grad(loss, wrt=(0, 1, 2))(q, k, v)

    sent = sends(function, *specs, options=IN_FLOAT32, layout="length:a")
    assert sent == [("float32", 32), ("float32", 32)]
    assert sends(function, *specs, options=IN_THE_SAME, layout="length:a") == [
        ("bfloat16", 16),
        ("bfloat16", 16),
    ]


def test_attention_to_parts_of_a_memory_is_rounded_once():
    """Parts of the memory are weighed and added up in float32: no number is off by rounding."""
    rng = np.random.default_rng(0)
    shapes = [("length", 8, "kv", 8), ("memory", 64, "kv", 8), ("memory", 64, "out", 8)]
    qkv = [row(rng.normal(size=(a, b)), "bfloat16", (m, n)) for m, a, n, b in shapes]
    q, k, v = (np.asarray(each).astype(np.float64) for each in qkv)
    weights = np.exp(q @ k.T / np.sqrt(8))
    exact = weights @ v / weights.sum(1, keepdims=True)

    def function(q, k, v):
        return md.attention(q, k, v, over="memory")

    def error(options):
        found = md.jit(function, "m:4", "memory:m", "numpy", options=options)(*qkv)
        return np.abs(np.asarray(found).astype(np.float64) - exact) / np.abs(exact)

    half_a_unit = 2.0**-8 * 1.01
    assert error(IN_FLOAT32).max() <= half_a_unit < error(None).max()
    sent = sends(function, *qkv, options=IN_FLOAT32, mesh="m:4", layout="memory:m")
    assert [dtype for dtype, _ in sent] == ["float32"] * 3


def ring_of_gradients(v, factor, *dtypes, backend="numpy", options=None):
    """Returns the gradient of the values of attention with equal weights, on a ring of devices."""
    length, memory = len(factor), len(v)
    q, k = np.zeros((length, 2)), np.zeros((memory, 2))

    def function(q, k, v, factor):
        def loss(v):
            attended = md.attention(q, k, v, over="memory", length="length")
            return md.sum(md.cast(attended * factor, "float32"))

        return md.grad(loss)(v)

    arrays = zip((q, k, v, factor), ("length", "memory", "memory", "length"), strict=True)
    inputs = [row(a, dtypes[0], (n, "kv")) for a, n in arrays]
    layout = "length:m; memory:m"
    run = md.jit(function, "m:4", layout, backend, options=options)
    return np.asarray(run(*inputs)), run.lower(*inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_in_a_ring_whose_parts_are_too_large_are_those_of_one_device(backend):
    factor = np.repeat([6e4, 6e4, -6e4, -6e4], 4)[:, None] * np.ones((1, 2))
    options = Options(context="ring")
    found, _ = ring_of_gradients(
        np.ones((4, 2)), factor, "float16", backend=backend, options=options
    )
    np.testing.assert_array_equal(found, np.zeros((4, 2)))


def test_gradients_in_a_ring_are_rounded_once():
    factor = np.random.default_rng(0).uniform(0.5, 1, (64, 16)).astype(ml_dtypes.bfloat16)
    exact = factor.astype(np.float64).sum(0) / 4 * np.ones((4, 1))

    def error(reduce_dtype):
        options = Options(context="ring", reduce_dtype=reduce_dtype)
        found, program = ring_of_gradients(np.ones((4, 16)), factor, "bfloat16", options=options)
        travels = {
            v.dtype.name
            for instruction, _ in program.block.walk()
            if instruction.op == "permute"
            for v in instruction.inputs
        }
        return np.abs(found.astype(np.float64) / exact - 1).max(), travels

    (once, wide), (more, narrow) = error("float32"), error("auto")
    assert once <= 2.0**-8 < more
    assert wide == {"bfloat16", "float32"} and narrow == {"bfloat16"}


def test_a_loop_that_adds_up_over_a_split_dim_is_that_of_one_device():
    def total(x):
        def body(carry, part):
            return carry + part, None

        return md.scan(body, md.zeros([], x.dtype), x, "x")[0]

    x = row([2e4, 2e4, 2e4, 0, -2e4, -2e4, -2e4, -2e4])
    found = md.jit(total, "a:2", "x:a", backend="numpy")(x)
    assert_close(found, md.jit(total, backend="numpy")(x))
