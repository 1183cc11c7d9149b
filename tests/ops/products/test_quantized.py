"""Products in 8 bits: their numbers, their gradients, and what lowering makes of them."""

import ml_dtypes
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ops.products.quantized import EightBits, Groups, quantized_einsum
from meshdsl.tensors.dtypes import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2

pytestmark = pytest.mark.optimized  # it is about rounding

INT8, FLOAT32 = np.dtype("int8"), np.dtype("float32")
HOWS = {
    "int8": EightBits(INT8, INT8),
    "fp8": EightBits(FLOAT8_E4M3, FLOAT8_E5M2),
    "int8+tensor": EightBits(INT8, INT8, per_tensor=True),
    "fp8+tensor": EightBits(FLOAT8_E4M3, FLOAT8_E5M2, per_tensor=True),
    "int8+unrounded": EightBits(INT8, INT8, rounded=False),
    "fp8+unrounded": EightBits(FLOAT8_E4M3, FLOAT8_E5M2, rounded=False),
}
batch, embed, d_ff = md.dims(batch=16, embed=24, d_ff=40)
LAYOUTS = (
    ("data:8", "batch:data"),
    ("data:2,model:4", "batch:data; d_ff:model"),
    ("data:2,model:4", "batch:data; embed:model"),
    ("data:2,model:3", "batch:data; d_ff:model"),  # which does not divide
    ("data:8", "batch:data; w/embed:data"),
    ("data:3,model:2", "batch:data; w/d_ff:data+model"),
)


def numbers(dims, seed, dtype=FLOAT32):
    """Returns normal numbers whose rows have scales of their own."""
    rng = np.random.default_rng(seed)
    data = rng.standard_normal([dim.size for dim in dims])
    return md.named((data * np.exp(rng.standard_normal((*data.shape[:-1], 1)))).astype(dtype), dims)


X, W, G = numbers([batch, embed], 0), numbers([embed, d_ff], 1), numbers([batch, d_ff], 2)


def product(how, out=(batch, d_ff)):
    """Returns a function: the product of x and w, and the gradients of both for a cotangent."""

    def function(x, w, g):
        def total(x, w):
            y = quantized_einsum(x, w, md.Shape(out), how)
            return md.sum(md.cast(y, "float32") * g), y

        (_, y), (dx, dw) = md.value_and_grad(total, wrt=(0, 1), has_aux=True)(x, w)
        return y, dx, dw

    return function


def reference(x, how, dtype, axis):
    """Returns the numbers that x is rounded to, in float64, with a scale for each row."""
    x = x.astype(np.float64)
    bound = 127 if dtype == INT8 else float(ml_dtypes.finfo(dtype).max)
    most = np.abs(x).max(axis=None if how.per_tensor else axis, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(most / bound)) if how.rounded else most / bound
    scale = scale.astype(np.float32).astype(np.float64)
    if dtype == INT8:
        return np.rint(x / scale) * scale
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize("name", [name for name in HOWS if "unrounded" not in name])
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_operands_and_cotangents_are_rounded_to_8_bits(name, backend):
    how = HOWS[name]
    y, dx, dw = map(np.asarray, md.jit(product(how), backend=backend)(X, W, G))
    x, w, g = (each.data.astype(np.float64) for each in (X, W, G))
    qx, qw = reference(x, how, how.forward, 1), reference(w, how, how.forward, 0)
    np.testing.assert_allclose(y, qx @ qw, rtol=2e-6, atol=2e-6 * np.abs(y).max())
    # The scales of w differ along d_ff, which the gradient of x sums over: they are part of g.
    scales_w = scale_of(w, how, 0)
    scales_x = scale_of(x, how, 1)
    expected = reference(g * scales_w, how, how.gradient, 1) @ (qw / scales_w).T
    np.testing.assert_allclose(dx, expected, rtol=2e-6, atol=2e-6 * np.abs(dx).max())
    expected = (qx / scales_x).T @ reference(g * scales_x, how, how.gradient, 0)
    np.testing.assert_allclose(dw, expected, rtol=2e-6, atol=2e-6 * np.abs(dw).max())


def scale_of(x, how, axis):
    """Returns scales that a product multiplies with before it rounds; one for each channel."""
    if how.per_tensor:
        return np.ones((1, 1))
    bound = 127 if how.forward == INT8 else 448
    return 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=axis, keepdims=True) / bound))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of qwix's use of flax
@pytest.mark.parametrize("name", ["int8+unrounded", "fp8+unrounded"])
def test_products_and_gradients_are_those_of_qwix(name):
    qwix = pytest.importorskip("qwix")
    import jax.numpy as jnp
    from flax import nnx

    class Linear(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.asarray(W.data))

        def __call__(self, x):
            return jnp.einsum("be,ed->bd", x, self.w[...])

    how = HOWS[name]
    # The bound of int8 is 127.5 in qwix, where a largest number may round to 127 or 128.
    scaled = f"absmax,{127.5 / 127}" if how.forward == INT8 else "absmax"
    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=how.forward.name,
        act_qtype=how.forward.name,
        bwd_qtype=how.gradient.name,
        weight_calibration_method=scaled,
        act_calibration_method=scaled,
        bwd_calibration_method=scaled,
    )
    model = qwix.quantize_model(Linear(), qwix.QtProvider([rule]), jnp.asarray(X.data))
    dw, dx = nnx.grad(lambda m, x: (m(x) * G.data).sum(), argnums=(0, 1))(model, X.data)
    expected = model(X.data), dx, dw["w"][...]
    for ours, theirs in zip(md.jit(product(how))(X, W, G), expected, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.long
@pytest.mark.parametrize("name", ["int8", "fp8", "int8+tensor"])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_every_layout_has_the_same_bits(name, mesh, layout, backend):
    """Sums of these few numbers are exact: the order in which devices add does not matter."""
    function = product(HOWS[name])
    x, w, g = (md.named(few_bits(each.data, name), each.dims) for each in (X, W, G))
    expected = md.jit(function, backend="numpy")(x, w, g)
    found = md.jit(function, mesh=mesh, layout=layout, backend=backend)(x, w, g)
    for ours, one_device in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(one_device))


def few_bits(x, name):
    """Returns numbers of which float32 adds products in float8 exactly; int8 needs no help."""
    return np.rint(np.clip(x, -3, 3)).astype(np.float32) if name == "fp8" else x


def test_layouts_have_the_same_bits_whatever_the_number_of_terms():
    """Sums of integers above 2^24 are reduced in int32, and rounded once."""
    terms = md.Dimension("terms", 4099)
    rng = np.random.default_rng(0)
    x, w = (
        md.named(rng.uniform(0.9, 1, [n, 4099]).astype(np.float32), [dim, terms])
        for n, dim in ((16, batch), (40, d_ff))
    )

    def function(x, w):
        return quantized_einsum(x, w, md.Shape([batch, d_ff]), HOWS["int8"])

    split = md.jit(function, mesh="data:8", layout="terms:data", backend="jax")
    one = md.jit(function, backend="numpy")(x, w)
    assert np.asarray(one).max() > 2**24 * 2.0**-13
    assert np.array_equal(np.asarray(split(x, w)), np.asarray(one))
    assert "s32" in str(split.lower(x, w))


@pytest.mark.parametrize("name", HOWS)
def test_scales_are_the_maximum_over_the_axes_that_split_the_scaled_dims(name):
    how = HOWS[name]
    f = md.jit(
        lambda x, w: quantized_einsum(x, w, md.Shape([batch, d_ff]), how),
        mesh="data:2,model:4",
        layout="batch:data; embed:model",
        backend="numpy",
    )
    reduced = [line for line in str(f.lower(X, W)).splitlines() if ", max, " in line]
    of_x = "data+model" if how.per_tensor else "model"
    assert [line.split(", max, ")[1].split(")")[0] for line in reduced] == [of_x, "model"]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_stored_weight_is_gathered_in_8_bits(name):
    f = md.jit(product(HOWS[name]), mesh="data:8", layout="batch:data; w/embed:data")
    gathers = [c for c in f.lower(X, W, G).collectives if c.kind == "all_gather"]
    (gather,) = gathers  # the backward pass reads it too
    assert gather.payload_bytes == embed.size * d_ff.size
    assert gather.wire_bytes == embed.size * d_ff.size * 7 / 8


@pytest.mark.long
@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_results_have_the_dtype_of_the_operands(name, dtype):
    x, w = (md.named(each.data.astype(np.dtype(dtype)), each.dims) for each in (X, W))
    for backend in ("numpy", "jax"):
        found = md.jit(product(HOWS[name]), backend=backend)(x, w, G)
        expected = md.jit(product(HOWS[name]), backend="numpy")(X, W, G)
        for ours, of_float32 in zip(found, expected, strict=True):
            assert ours.dtype == np.dtype(dtype)
            exact = np.asarray(of_float32, np.float64)
            error = np.asarray(ours, np.float64) - exact
            assert np.abs(error).max() <= 0.15 * np.abs(exact).max()


def test_partial_sums_of_bfloat16_are_reduced_in_bfloat16():
    x, w = (md.named(each.data.astype(BFLOAT16), each.dims) for each in (X, W))
    f = md.jit(
        lambda x, w: quantized_einsum(x, w, md.Shape([batch, d_ff]), HOWS["int8"]),
        mesh="model:8",
        layout="embed:model",
    )
    last = f.lower(x, w).collectives[-1]
    assert last.payload_bytes == 2 * batch.size * d_ff.size


@pytest.mark.parametrize("name", HOWS)
def test_zeros_and_infinities_stay_what_they_are(name):
    zeros = md.named(np.zeros(X.data.shape, np.float32), X.dims)
    bad = np.array(X.data)
    bad[3, 5] = np.inf
    bad[4, 6] = np.nan
    function = md.jit(product(HOWS[name]))
    assert all(np.isfinite(np.asarray(t)).all() for t in function(zeros, W, G))
    y = np.asarray(function(md.named(bad, X.dims), W, G)[0])
    assert not np.isfinite(y[3:5]).any()


def test_a_product_that_sums_over_nothing_is_not_rounded():
    row = md.named(W.data[0], [d_ff])
    column = md.named(X.data[:, 0], [batch])
    function = md.jit(product(HOWS["fp8"]))
    assert np.array_equal(np.asarray(function(column, row, G)[0]), np.outer(column.data, row.data))


def test_experts_have_scales_of_their_own():
    """A dim of both operands and the result splits a product into several."""
    experts, tokens = md.dims(experts=4, tokens=8)
    x, w = numbers([experts, tokens, embed], 3), numbers([experts, embed, d_ff], 4)

    def both(x, w):
        out = md.Shape([experts, tokens, d_ff])
        return quantized_einsum(x, w, out, HOWS["int8"])

    found = np.asarray(md.jit(both, mesh="expert:4", layout="experts:expert")(x, w))
    one = md.jit(lambda x, w: quantized_einsum(x, w, md.Shape([tokens, d_ff]), HOWS["int8"]))
    for i in range(4):
        parts = md.named(x.data[i], x.dims[1:]), md.named(w.data[i], w.dims[1:])
        assert np.array_equal(found[i], np.asarray(one(*parts)))


length, choice, experts = md.dims(length=5, choice=2, experts=3)
TOKENS, STACKED = numbers([length, embed], 5), numbers([experts, embed, d_ff], 6)
COTANGENT = numbers([length, choice, d_ff], 7)
# The last expert has no rows, and some rows have no expert.
ROUTED = np.array([[0, 1], [1, -1], [0, 3], [1, 0], [0, 1]], np.int32)


def grouped(how, out=(length, choice, d_ff)):
    """Returns a function: the products of tokens with their experts, and both gradients."""

    def function(x, w, group, g):
        def total(x, w):
            y = quantized_einsum(x, w, md.Shape(out), how, Groups("experts", group))
            return md.sum(y * g), y

        (_, y), (dx, dw) = md.value_and_grad(total, wrt=(0, 1), has_aux=True)(x, w)
        return y, dx, dw

    return function


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_each_group_has_scales_of_its_own(name, backend):
    how = HOWS[name]
    group = md.named(ROUTED, [length, choice])
    results = md.jit(grouped(how), backend=backend)(TOKENS, STACKED, group, COTANGENT)
    x, w, g = (each.data.astype(np.float64) for each in (TOKENS, STACKED, COTANGENT))
    inside = (ROUTED >= 0) & (ROUTED < 3)
    number = np.where(inside, ROUTED, 0)
    qx, qw = reference(x, how, how.forward, 1), reference(w, how, how.forward, 1)
    y = np.einsum("te,tkef->tkf", qx, qw[number]) * inside[..., None]
    # The scales of w differ along d_ff, those of x along the rows: they are part of the cotangent.
    scales_w, scales_x = scale_of(w, how, 1), scale_of(x, how, 1)
    g_w = g * scales_w[number][:, :, 0] * inside[..., None]
    g_w = reference(g_w, how, how.gradient, (1, 2))
    dx = np.einsum("tkf,tkef->te", g_w, (qw / scales_w)[number] * inside[..., None, None])
    g_x = reference(g * scales_x[:, :, None], how, how.gradient, (0, 1))
    one_hot = (ROUTED[..., None] == np.arange(3)).astype(np.float64)
    dw = np.einsum("te,tkf,tkn->nef", qx / scales_x, g_x, one_hot)
    for ours, expected in zip(map(np.asarray, results), (y, dx, dw), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["int8", "fp8+tensor", "int8+unrounded"])
@pytest.mark.parametrize("out", [(length, choice, d_ff), (choice, d_ff)])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("data:3", "length:data"),  # which does not divide
        ("data:2,model:2", "choice:data; experts:model"),
        ("data:2,model:4", "experts:data; embed:model"),
        ("data:3,model:2", "w/embed:data; d_ff:model"),
    ],
)
def test_grouped_products_have_the_numbers_of_one_device(name, out, mesh, layout):
    group = md.named(ROUTED, [length, choice])
    g = md.named(COTANGENT.data if len(out) == 3 else COTANGENT.data[0], out)
    arguments = TOKENS, STACKED, group, g
    function = grouped(HOWS[name], out)
    one = md.jit(function, backend="numpy")(*arguments)
    split = md.jit(function, mesh=mesh, layout=layout, backend="numpy")(*arguments)
    for ours, expected in zip(map(np.asarray, split), map(np.asarray, one), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("layout", ["length:data; w/embed:data", "length:data; experts:data"])
def test_experts_are_gathered_in_8_bits(layout):
    wide = md.dims(embed=96, d_ff=80)
    x = md.spec([md.Dimension("length", 512), wide[0]])
    w = md.spec([experts, *wide])
    group = md.spec([md.Dimension("length", 512)], "int32")

    def function(x, w, group):
        out = md.Shape([md.Dimension("length", 512), wide[1]])
        return quantized_einsum(x, w, out, HOWS["fp8"], Groups("experts", group))

    program = md.jit(function, mesh="data:3", layout=layout, backend="numpy").lower(x, w, group)
    largest, *others = sorted((c.payload_bytes for c in program.collectives), reverse=True)
    assert largest == experts.size * 96 * 80
    assert sum(others) <= 2 * 4 * experts.size * 80  # the maxima, and the scales


@pytest.mark.long
@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("factor", [2.0**-90, 2.0**60])
def test_tiny_and_huge_cotangents_have_the_gradients_of_others(name, factor):
    function = md.jit(product(HOWS[name]))
    _, *expected = map(np.asarray, function(X, W, G))
    _, *ours = map(np.asarray, function(X, W, md.named(G.data * np.float32(factor), G.dims)))
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float64) / factor, other, rtol=1e-5, atol=1e-5)


def test_integers_are_refused():
    whole = md.named(np.ones((16, 24), np.int32), X.dims)
    with pytest.raises(ValueError, match=r"8 bits are for floating-point tensors, not for s32\["):
        md.jit(lambda x, w: quantized_einsum(x, w, md.Shape([batch, d_ff]), HOWS["int8"]))(whole, W)


@pytest.mark.parametrize("way", ["grad", "jvp"])
def test_second_and_forward_derivatives_are_refused(way):
    def total(x, w):
        return md.sum(md.square(quantized_einsum(x, w, md.Shape([batch, d_ff]), HOWS["int8"])))

    def second(x, w):
        if way == "jvp":
            return md.jvp(lambda w: total(x, w), (w,), (w,))
        return md.grad(lambda w: md.sum(md.square(md.grad(total)(x, w))))(w)

    with pytest.raises(ValueError, match="products in 8 bits have a first gradient in reverse"):
        md.jit(second)(X, W)
