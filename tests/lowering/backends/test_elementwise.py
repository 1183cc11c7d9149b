"""The numpy and JAX backends agree on every elementwise operation, dtype and difficult value."""

import inspect
import warnings

import numpy as np
import pytest

import meshdsl as md
from meshdsl.ops.elementwise.broadcasting import ELEMENTWISE
from meshdsl.tensors.dtypes import as_dtype, is_differentiable, is_float, real_dtype, rounding

FLOATS = [0.0, -0.0, 1.0, -1.5, 2.5, 0.3, -7.0, 88.0, np.inf, -np.inf, np.nan, 1e-3]
WHOLE = [0, 1, 2, 3, 7, 100, -1, -3, -100]
COMPLEX = [1, 3, -1.5, 2j, 0.3 - 0.7j, -2 + 1j, -0.5 - 3j]
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]
APART = ("select", "cast", "stop_gradient", "polygamma", "zeta")  # of other operands


def values(dtype):
    if dtype == np.bool_:
        return np.array([True, False])
    if dtype.kind == "c":
        return np.array(COMPLEX, dtype)
    if is_float(dtype):
        return np.array(FLOATS).astype(dtype)
    return np.array([v for v in WHOLE if np.iinfo(dtype).min <= v], dtype)


def both(function, *arrays):
    for backend in ("numpy", "jax"):
        yield [np.asarray(found) for found in md.jit(function, backend=backend)(*arrays)]


def assert_same(found, expected, dtype):
    assert found.dtype == expected.dtype
    if not is_differentiable(found.dtype):
        assert np.array_equal(found, expected)
        return
    tolerance = rounding(real_dtype(dtype)) * (1 if dtype.itemsize == 2 else 2)
    if found.dtype.kind == "c":
        tolerance, found, expected = 2 * tolerance, parts(found), parts(expected)
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        close = np.abs(found - expected) <= tolerance * np.maximum(1, np.abs(expected))
    same = (found == expected) | (np.isnan(found) & np.isnan(expected)) | close
    assert same.all(), (found[~same], expected[~same])


def parts(x):
    """Complex numbers as pairs, all NaN where one is not finite: there libraries differ."""
    return np.where(np.isfinite(x)[None], [x.real, x.imag], np.nan)


def takes(function, *given):
    try:
        md.jit(lambda *given: md.outer(function, *given)).trace(*given)
    except ValueError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_that_takes_the_dtype(dtype):
    dtype = as_dtype(dtype)
    x, y = md.named(values(dtype), ["a"]), md.named(values(dtype), ["b"])
    functions = {name: getattr(md, name) for name in ELEMENTWISE if name not in APART}
    operands = {n: len(inspect.signature(f).parameters) for n, f in functions.items()}
    taken = [name for name in functions if takes(functions[name], *(x, y)[: operands[name]])]
    assert len(taken) >= {"b": 6, "i": 20, "u": 20, "c": 20}.get(dtype.kind, 40)

    def model(x, y):
        return [md.outer(functions[name], *(x, y)[: operands[name]]) for name in taken]

    for name, found, expected in zip(taken, *both(model, x, y), strict=True):
        try:
            assert_same(found, expected, dtype)
        except AssertionError as error:
            error.add_note(f"{name} of {dtype}")
            raise


@pytest.mark.parametrize("before", DTYPES)
def test_casts_saturate(before):
    """What an integer dtype does not hold becomes its nearest number, and NaN becomes 0."""
    before = as_dtype(before)
    numbers = values(before)
    if is_float(before):
        numbers = np.append(numbers, np.array([300, -300, 3e4, -6e4], before))
    afters = [d for d in DTYPES if before.kind != "c" or d.startswith("complex")]

    def model(x):
        return [md.cast(x, after) for after in afters]

    for after, found, expected in zip(afters, *both(model, md.named(numbers, ["a"])), strict=True):
        assert_same(found, expected, as_dtype(after))
        if is_float(before) and after == "int8":
            with np.errstate(all="ignore"):
                inside = np.clip(np.nan_to_num(numbers.astype(float)), -128, 127)
            assert np.array_equal(found, inside.astype(np.int8))
