"""Bit operations against numpy, on every integer dtype."""

import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import message, random, run

WHOLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
a, b = md.dims(a=5, b=3)


def operands(dtype):
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max, 5, dtype, endpoint=True)
    y = rng.integers(limits.min, limits.max, 3, dtype, endpoint=True)
    return md.named(x, [a]), md.named(y, [b])


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", WHOLE)
def test_operators_are_numpys(dtype, backend):
    x, y = operands(dtype)

    def model(x, y):
        both = md.outer(lambda x, y: [x & y, x | y, x ^ y], x, y)
        return [*both, ~x, x & 1, 3 | x, 1 ^ x, md.population_count(x)]

    p, q = x.data[:, None], y.data
    ones = [bin(int(v) % 2 ** (8 * v.itemsize)).count("1") for v in x.data]
    expected = [p & q, p | q, p ^ q, ~x.data, x.data & 1, 3 | x.data, 1 ^ x.data, ones]
    for mine, other in zip(run(model, x, y, backend=backend), expected, strict=True):
        assert mine.dtype == dtype
        assert np.array_equal(mine, other)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", WHOLE)
def test_shifts_keep_the_sign_and_run_out_of_bits(dtype, backend):
    x, _ = operands(dtype)
    bits = np.iinfo(dtype).bits
    found = run(
        lambda x: [x << 1, x >> 1, x << bits, x >> bits, 1 << (x & 3), 64 >> (x & 3)],
        x,
        backend=backend,
    )
    emptied = np.where(x.data < 0, -1, 0).astype(dtype)
    low, one = x.data & 3, np.ones(5, dtype)
    expected = [x.data << 1, x.data >> 1, 0 * x.data, emptied, one << low, (64 * one) >> low]
    for mine, other in zip(found, expected, strict=True):
        assert np.array_equal(mine, other)


def test_of_bools_they_are_the_logical_ones():
    x, y = np.array([True, True, False]), np.array([True, False, True])
    for backend in ("numpy", "jax"):
        found = run(
            lambda x, y: [x & y, x | y, x ^ y, ~x, True ^ x, md.logical_xor(x, y)],
            *(md.named(x, [b]), md.named(y, [b])),
            backend=backend,
        )
        for mine, other in zip(found, [x & y, x | y, x ^ y, ~x, ~x, x ^ y], strict=True):
            assert np.array_equal(mine, other)


def test_mistakes_are_told():
    assert "shift_left: needs integer tensors, got f64" in message(lambda x: x << 1, random([a]))
    assert "bit_or: int8 holds whole numbers from -128 to 127, not 300" in message(
        lambda x: x | 300, md.named(np.ones(5, np.int8), [a])
    )
