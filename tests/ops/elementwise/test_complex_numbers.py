"""Complex numbers: values and cotangents are JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_close, message, random, run

a, b, c = md.dims(a=4, b=3, c=2)


def complex_random(dims, seed=0):
    return md.named(random(dims, seed=seed).data + 1j * random(dims, seed=seed + 50).data, dims)


def assert_parts(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    assert_close(found.real, expected.real)
    assert_close(found.imag, expected.imag)


UNARY = (
    "exp expm1 log log1p sqrt square sin cos tan sinh cosh tanh negative abs conj real imag angle "
    "reciprocal"
).split()
THEIRS = {"rsqrt": jax.lax.rsqrt}


@pytest.mark.long
@pytest.mark.parametrize("name", [*UNARY, "rsqrt"])
def test_functions_and_their_cotangents(name):
    ours, theirs = getattr(md, name), THEIRS.get(name) or getattr(jnp, name)
    x = complex_random([a, b])
    weights = random([a, b], seed=9)

    def scalar(library, function):
        def total(x):
            y = function(x)
            return library.sum(library.real(y) * weights + 2 * library.imag(y) * weights)

        return total

    for backend in ("numpy", "jax"):
        assert_parts(run(ours, x, backend=backend), theirs(x.data))
        found = run(md.grad(scalar(md, ours)), x, backend=backend)
        weights = weights.data
        assert_parts(found, jax.grad(scalar(jnp, theirs))(x.data))
        weights = md.named(weights, [a, b])


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "power"])
def test_arithmetic_and_its_cotangents(name):
    x, y = complex_random([a, b]), complex_random([a], seed=1)
    ours = getattr(md, name)

    def theirs(x, y):
        return getattr(jnp, name)(x, y[:, None])

    assert_parts(run(ours, x, y), theirs(x.data, y.data))
    found = run(md.grad(lambda x, y: md.sum(md.abs(ours(x, y))), (0, 1)), x, y)
    expected = jax.grad(lambda x, y: jnp.abs(theirs(x, y)).sum(), (0, 1))(x.data, y.data)
    for mine, other in zip(found, expected, strict=True):
        assert_parts(mine, other)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", ["a:data; b:model", "b:data+model", "c:model; a:data"])
def test_products_and_sums_on_a_mesh(layout, backend):
    x, y = complex_random([a, b]), complex_random([b, c], seed=1)

    def model(x, y):
        z = md.einsum(x, y, over="b")
        return md.sum(md.square(md.abs(z))), md.mean(z), md.real(z)

    def loss(x, y):
        return model(x, y)[0]

    z = x.data @ y.data
    arguments = {"mesh": "data:2,model:2", "layout": layout, "backend": backend}
    found = run(model, x, y, **arguments)
    for mine, other in zip(found, [(np.abs(z) ** 2).sum(), z.mean(), z.real], strict=True):
        assert_parts(mine, other)
    found = run(md.grad(loss, (0, 1)), x, y, **arguments)
    expected = jax.grad(lambda x, y: (jnp.abs(x @ y) ** 2).sum(), (0, 1))(x.data, y.data)
    for mine, other in zip(found, expected, strict=True):
        assert_parts(mine, other)


def test_made_of_parts_and_back():
    x, y = random([a, b]), random([a], seed=1)

    def loss(x, y):
        z = md.complex(x, y)
        return md.sum(md.abs(z * z + 1j)) + md.sum(md.angle(z))

    def reference(x, y):
        z = jax.lax.complex(x, jnp.broadcast_to(y[:, None], x.shape))
        return jnp.abs(z * z + 1j).sum() + jnp.angle(z).sum()

    assert_close(run(loss, x, y), reference(x.data, y.data))
    expected = jax.grad(reference, (0, 1))(x.data, y.data)
    for mine, other in zip(run(md.grad(loss, (0, 1)), x, y), expected, strict=True):
        assert_parts(mine, other)


def test_dtypes_of_parts():
    for real, both in (("float32", "complex64"), ("float64", "complex128")):
        x = md.named(np.ones(4, real), [a])
        z = run(lambda x: md.complex(x, 2), x)
        assert z.dtype == both
        parts = run(lambda z: [md.real(z), md.imag(z), md.abs(z), md.angle(z)], z)
        assert [p.dtype.name for p in parts] == [real] * 4
        assert run(functools.partial(md.cast, dtype=both), x).dtype == both
    assert md.named([1j], ["a"]).dtype == np.complex64
    assert run(lambda x: md.full([a], 1j, "complex64") + 2, x).data[0] == 2 + 1j


def test_a_real_number_is_its_own_real_part():
    x = random([a])
    found = run(lambda x: [md.real(x), md.imag(x), md.conj(x), md.angle(x)], x)
    for mine, other in zip(found, [x.data, 0 * x.data, x.data, np.angle(x.data)], strict=True):
        assert_close(mine, other)


def test_the_gradient_of_a_real_number_that_becomes_complex_is_real():
    found = run(md.grad(lambda x: md.sum(md.real(md.cast(x, "complex128") * 1j) + x)), random([a]))
    assert found.dtype == np.float64
    assert_close(found, np.ones(4))


def test_mistakes_are_told():
    half, z = md.named(np.ones(4, np.float16), [a]), complex_random([a])
    assert "complex: no complex dtype has parts of float16; cast to float32 or float64" in message(
        lambda x: md.complex(x, x), half
    )
    assert "real: needs complex or floating-point tensors, got s64" in message(
        md.real, md.named(np.arange(4), [a])
    )
    assert "floor: needs floating-point tensors, got c128" in message(md.floor, z)
    assert "only a floating-point tensor without dims has a gradient, got c128[]" in message(
        md.grad(lambda z: md.sum(z)), z
    )
