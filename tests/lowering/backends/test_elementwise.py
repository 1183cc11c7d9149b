"""The numpy and JAX backends agree on every elementwise operation, dtype and difficult value."""

import warnings

import numpy as np
import pytest

import meshdsl as md
from meshdsl.dtypes import as_dtype, is_float
from meshdsl.ops.elementwise import BINARY, UNARY

FLOATS = [0.0, -0.0, 1.0, -1.5, 2.5, 0.3, -7.0, 88.0, np.inf, -np.inf, np.nan, 1e-3]
WHOLE = [0, 1, 2, 3, 7, 100, -1, -3, -100]
DTYPES = ["bool", "int8", "int32", "uint8", "uint32", "int64", "bfloat16", "float32", "float64"]


def values(dtype):
    if dtype == np.bool_:
        return np.array([True, False])
    if is_float(dtype):
        return np.array(FLOATS).astype(dtype)
    return np.array([v for v in WHOLE if np.iinfo(dtype).min <= v], dtype)


def both(function, *arrays):
    for backend in ("numpy", "jax"):
        yield np.asarray(md.jit(function, backend=backend)(*arrays))


def assert_same(found, expected, dtype):
    assert found.dtype == expected.dtype
    if not is_float(found.dtype):
        assert np.array_equal(found, expected)
        return
    tolerance = {2: 2.0**-7, 4: 2e-6, 8: 1e-13}[found.dtype.itemsize]
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        close = np.abs(found - expected) <= tolerance * np.maximum(1, np.abs(expected))
    same = (found == expected) | (np.isnan(found) & np.isnan(expected)) | close
    assert same.all(), (found[~same], expected[~same])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_that_takes_the_dtype(dtype):
    dtype = as_dtype(dtype)
    numbers = values(dtype)
    x, y = md.named(numbers, ["a"]), md.named(numbers, ["b"])
    checked = 0
    for name in [*UNARY, *BINARY]:
        function, given = getattr(md, name), (x,) if name in UNARY else (x, y)
        if name in ("remainder", "power") and not is_float(dtype):
            given = (x, md.named(np.array([1, 2, 3], dtype), ["b"]))
        try:
            md.jit(function).trace(*given)
        except ValueError:
            continue
        found, expected = both(function, *given)
        try:
            assert_same(found, expected, dtype)
        except AssertionError as error:
            error.add_note(f"{name} of {dtype}")
            raise
        checked += 1
    assert checked >= {"b": 5, "i": 12, "u": 12}.get(dtype.kind, 30)
