"""Fourier transforms: values are numpy's, cotangents JAX's, on any layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_close, message, random, run

batch, odd, even = md.dims(batch=4, odd=5, even=6)
LAYOUTS = [
    "batch:data; odd:model",
    "odd:data; even:model",
    "even:data+model",
    "batch:model+data",
]


def complex_random(dims, seed=0):
    return md.named(random(dims, seed=seed).data + 1j * random(dims, seed=seed + 50).data, dims)


def assert_parts(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    assert_close(found.real, expected.real)
    assert_close(found.imag, expected.imag)


TRANSFORMS = {  # ours, theirs, is the operand complex
    "fft": (lambda x: md.fft.fft(x, "odd"), lambda x: jnp.fft.fft(x, axis=1), True),
    "ifft": (lambda x: md.fft.ifft(x, "even"), lambda x: jnp.fft.ifft(x, axis=2), True),
    "fft of reals": (
        lambda x: md.fft.fft(x, ["odd", "even"]),
        lambda x: jnp.fft.fft2(x),
        False,
    ),
    "rfft": (lambda x: md.fft.rfft(x, "odd"), lambda x: jnp.fft.rfft(x, axis=1), False),
    "even rfft": (
        lambda x: md.fft.rfft(x, "even", "wave"),
        lambda x: jnp.fft.rfft(x, axis=2),
        False,
    ),
    "rfft of two": (lambda x: md.fft.rfft(x, ["odd", "even"]), jnp.fft.rfft2, False),
    "irfft": (lambda x: md.fft.irfft(x, "odd"), lambda x: jnp.fft.irfft(x, axis=1), True),
    "odd irfft": (
        lambda x: md.fft.irfft(x, "even", md.Dimension("n", 11)),
        lambda x: jnp.fft.irfft(x, 11, axis=2),
        True,
    ),
    "irfft of two": (
        lambda x: md.fft.irfft(x, ["odd", "even"]),
        lambda x: jnp.fft.irfft2(x),
        True,
    ),
}


def loss_of(transform, library):
    def loss(x):
        y = transform(x)
        magnitude = library.abs(y) if y.dtype.kind == "c" else y
        return library.sum(library.sin(magnitude + 0.5))

    return loss


@pytest.mark.long
@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_and_cotangents_on_any_layout(name):
    ours, theirs, is_complex = TRANSFORMS[name]
    x = (complex_random if is_complex else random)([batch, odd, even])
    slope = jax.grad(loss_of(theirs, jnp))(x.data)
    assert_parts(run(ours, x), theirs(x.data))
    assert_parts(run(md.grad(loss_of(ours, md)), x), slope)
    for layout in LAYOUTS:
        for backend in ("numpy", "jax"):
            arguments = {"mesh": "data:2,model:2", "layout": layout, "backend": backend}
            found = run(lambda x: (ours(x), md.grad(loss_of(ours, md))(x)), x, **arguments)
            assert_parts(found[0], theirs(x.data))
            assert_parts(found[1], slope)


def test_transforms_are_undone():
    x = random([batch, odd, even])

    def model(x):
        waves = md.fft.rfft(x, ["even", "odd"], "wave")
        return md.fft.irfft(waves, ["even", "wave"], odd), md.real(
            md.fft.ifft(md.fft.fft(x, "odd"), "odd")
        )

    for found in run(model, x):
        assert_close(found, x.data)


def test_the_gradient_of_a_gradient():
    x = random([odd])

    def twice(library, transform):
        def loss(x):
            return library.sum(library.square(library.abs(transform(x))) ** 2)

        return loss

    ours, theirs = twice(md, lambda x: md.fft.rfft(x, "odd")), twice(jnp, jnp.fft.rfft)
    found = run(md.grad(lambda x: md.sum(md.sin(md.grad(ours)(x)))), x)
    assert_close(found, jax.grad(lambda x: jnp.sin(jax.grad(theirs)(x)).sum())(x.data))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_single_precision_stays_single(backend):
    x = md.named(random([batch, even]).data.astype(np.float32), [batch, even])
    waves = run(lambda x: md.fft.rfft(x, "even"), x, backend=backend)
    assert waves.dtype == np.complex64
    assert np.abs(waves.data - np.fft.rfft(x.data)).max() < 1e-5
    assert run(lambda w: md.fft.irfft(w, "even"), waves, backend=backend).dtype == np.float32


def test_mistakes_are_told():
    x, z = random([batch, odd]), complex_random([batch, odd])
    for function, text in [
        (lambda: md.fft.fft(x, "length"), "fft: no dim `length` in [batch=4, odd=5]"),
        (lambda: md.fft.fft(x, []), "fft: needs at least one dim to transform along"),
        (lambda: md.fft.rfft(x, []), "rfft: needs at least one dim to transform along"),
        (lambda: md.fft.rfft(z, "odd"), "rfft: needs floating-point tensors, got c128"),
        (lambda: md.fft.irfft(x, "odd"), "irfft: needs complex tensors, got f64"),
        (
            lambda: md.fft.rfft(x, "odd", even),
            "rfft: the last transformed dim has size 3, but even=6 is to name it",
        ),
        (lambda: md.fft.irfft(z, "odd", even), "irfft: even=6 has 4 waves, but there are odd=5"),
        (
            lambda: md.fft.fft(md.cast(x, "bfloat16"), "odd"),
            "fft: no complex dtype has parts of bfloat16; cast to float32 or float64 first",
        ),
    ]:
        assert text in message(function)
