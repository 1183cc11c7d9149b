"""Special functions: values are SciPy's, derivatives those of JAX or of the next function."""

import numpy as np
import pytest
from jax.scipy import special
from scipy import special as scipy_special

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b = md.dims(a=4, b=3)

UNARY = {  # ours: (SciPy's name, JAX's function, low, high)
    "erf": ("erf", special.erf, -2, 2),
    "erfc": ("erfc", special.erfc, -2, 5),
    "erf_inv": ("erfinv", special.erfinv, -0.95, 0.95),
    "lgamma": ("gammaln", special.gammaln, 0.2, 5),
    "digamma": ("digamma", special.digamma, 0.2, 5),
    "bessel_i0e": ("i0e", special.i0e, -3, 9),
    "bessel_i1e": ("i1e", special.i1e, 0.5, 9),
    "logit": ("logit", special.logit, 0.1, 0.9),
}


@pytest.mark.long
@pytest.mark.parametrize("name", UNARY)
def test_unary_functions_and_two_derivatives(name):
    scipy_name, reference, low, high = UNARY[name]
    x = random([a, b], low, high)
    expected = getattr(scipy_special, scipy_name)(x.data)
    for backend in ("numpy", "jax"):
        assert_close(run(getattr(md, name), x, backend=backend), expected)
    assert_agree(getattr(md, name), reference, x, order=2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lgamma_is_accurate_beside_its_zeros(dtype):
    unit = np.finfo(dtype).eps
    steps = 2.0 ** np.arange(-40 if dtype == "float64" else -20, -1)
    beside = [zero + sign * steps for zero in (1, 2) for sign in (1, -1)]
    points = np.concatenate([[1, 2], *beside, np.linspace(0.5, 3.5, 999)[1:-1]]).astype(dtype)
    expected = scipy_special.gammaln(points.astype(np.float64))
    first, second = -np.euler_gamma * (points - 1), (1 - np.euler_gamma) * (points - 2)
    slopes = np.where(points < 1.5, first, second)
    is_linear = np.abs(slopes) < 1e-5
    for backend in ("numpy", "jax", "tf"):
        found = np.asarray(run(md.lgamma, md.named(points, ["n"]), backend=backend))
        assert list(found[:2]) == [0, 0]
        error = np.abs(found.astype(np.float64) - expected)
        # SciPy's own float64 has an error of about 1e-16 beside zeros.
        assert (error <= 6 * unit * np.abs(expected) + 4e-16).all(), backend
        np.testing.assert_allclose(found[is_linear], slopes[is_linear], rtol=1e-4, atol=4e-16)


@pytest.mark.parametrize("name", ["xlogy", "xlog1py"])
def test_products_with_a_logarithm(name):
    x, y = random([a], 0.1, 2), random([a], 0.2, 2, seed=1)
    assert_agree(getattr(md, name), getattr(special, name), x, y, order=2)
    zero = md.named(np.zeros(4), [a])
    start = 0 if name == "xlogy" else -1
    at_pole = md.named(np.full(4, float(start)), [a])
    for backend in ("numpy", "jax"):
        assert_close(run(getattr(md, name), zero, at_pole, backend=backend), np.zeros(4))
    slope = md.grad(lambda y, x: md.sum(getattr(md, name)(x, y)))
    assert_close(run(slope, at_pole, zero), np.zeros(4))


def test_polygamma_and_zeta_are_scipys():
    x = random([a, b], 0.3, 4)
    n = md.named(np.arange(3.0), [b])
    for backend in ("numpy", "jax"):
        found = run(md.polygamma, n, x, backend=backend)
        assert_close(found.data.T if found.dims[0] == b else found, expected_polygamma(n, x))
        assert_close(run(lambda x: md.zeta(x + 1, 2.5), x), scipy_special.zeta(x.data + 1, 2.5))
    assert_agree(
        lambda x: md.polygamma(1, x), lambda x: special.polygamma(1, x), random([a], 0.5, 4)
    )
    slope = run(
        md.grad(lambda q: md.sum(md.zeta(md.full([], 3.0, "float64"), q))), random([a], 1, 2)
    )
    assert_close(slope, -3 * scipy_special.zeta(4, random([a], 1, 2).data))


def expected_polygamma(n, x):
    return scipy_special.polygamma(n.data.astype(int), x.data)


def test_bessel_i1e_has_its_slope_at_zero():
    x = md.named(np.zeros(4), [a])
    assert_close(run(md.grad(lambda x: md.sum(md.bessel_i1e(x))), x), np.full(4, 0.5))


@pytest.mark.parametrize("name", [n for n in UNARY if n != "logit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_is_rounding_away(name, dtype):
    _, reference, low, high = UNARY[name]
    x = md.named(random([a, b], low, high).data.astype(md.spec([a], dtype).dtype), [a, b])
    expected = np.asarray(reference(x.data.astype(np.float64)))
    for backend in ("numpy", "jax"):
        found = run(getattr(md, name), x, backend=backend)
        assert found.dtype == x.dtype
        tolerance = 2e-5 if dtype == "float32" else 3e-2
        assert_close(np.asarray(found, np.float64), expected, tolerance)


def test_orders_have_no_gradient():
    text = message(md.grad(lambda n: md.sum(md.polygamma(n, 1.5))), random([a], 1, 2))
    assert "polygamma and zeta have no gradient by their first operand; wrap it in" in text


def test_mistakes_are_told():
    assert "lgamma: needs floating-point tensors, got s64" in message(
        md.lgamma, md.named(np.arange(4), [a])
    )
