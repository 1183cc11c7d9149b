"""Floats of 8 bits: every backend rounds to them, keeps them and reads them as ml_dtypes does."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors.dtypes import as_dtype

pytestmark = pytest.mark.optimized  # it is about rounding

FORMATS = ["float8_e4m3fn", "float8_e5m2"]
# The largest numbers and what is next to them, the least ones, and halves between two numbers.
EDGES = [448, 449, 464, 465, 480, 57344, 61439, 61440, 65536, 1e30, 2.0**-9, 2.0**-10, 2.0**-17]
EDGES += [1.0001 * 2.0**-10, 1.01 * 2.0**-17, 1e-40, 1.0625, 1.1875, 1.125, 1.375]


def numbers(dtype):
    rng = np.random.default_rng(0)
    many = rng.standard_normal(2000) * np.exp2(rng.integers(-20, 18, 2000))
    edges = np.array(EDGES)
    every = np.concatenate([many, edges, -edges, [0.0, -0.0, np.inf, -np.inf, np.nan]])
    with np.errstate(over="ignore"):
        return every.astype(as_dtype(dtype))


def assert_same(ours, expected):
    assert np.array_equal(ours, expected, equal_nan=True)
    assert np.array_equal(np.signbit(ours[ours == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("narrow", FORMATS)
def test_numbers_are_rounded(narrow, wide, backend):
    x = numbers(wide)
    f = md.jit(lambda x: md.cast(md.cast(x, narrow), "float32"), backend=backend)
    with np.errstate(all="ignore"):
        expected = x.astype(as_dtype(narrow)).astype(np.float32)
        assert_same(np.asarray(f(md.named(x, ["n"]))), expected)


@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
@pytest.mark.parametrize("narrow", FORMATS)
def test_every_number_is_read(narrow, backend):
    every = np.arange(256, dtype=np.uint8).view(as_dtype(narrow))
    f = md.jit(lambda x: md.cast(x, "float32"), backend=backend)
    assert_same(np.asarray(f(md.named(every, ["n"]))), every.astype(np.float32))
