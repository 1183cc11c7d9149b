"""Element types: floats of 8 bits are cast, moved and multiplied, alike on every backend."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors.dtypes import as_dtype, is_differentiable, is_float, kind, largest, short

FLOATS8 = ["float8_e4m3fn", "float8_e5m2"]
n, m = md.dims(n=8, m=6)


@pytest.mark.parametrize("name", FLOATS8)
def test_a_float_of_8_bits_has_a_kind_of_its_own(name):
    dtype = as_dtype(name)
    assert dtype.itemsize == 1
    assert (dtype.name, short(dtype), kind(dtype)) == (name, name.replace("float8_", "f8"), "e")
    assert not is_float(dtype)
    assert not is_differentiable(dtype)
    assert largest(dtype) == {"float8_e4m3fn": 448, "float8_e5m2": 57344}[name]


@pytest.mark.parametrize("name", FLOATS8)
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_casts_are_those_of_ml_dtypes(name, backend):
    dtype = as_dtype(name)
    with np.errstate(over="ignore", invalid="ignore"):
        every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        between = np.random.default_rng(0).standard_normal(2000) * np.logspace(-6, 6, 2000)
        x = np.concatenate([every, between, [0.0, -0.0]]).astype(np.float32)
        expected = x.astype(dtype)
    row = md.Dimension("row", x.size)

    def there_and_back(x):
        narrow = md.cast(x, name)
        return narrow, md.cast(narrow, "float32")

    narrow, wide = md.jit(there_and_back, backend=backend)(md.named(x, [row]))
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(np.asarray(wide), expected.astype(np.float32))
    finite = np.isfinite(expected.astype(np.float32))
    bits = np.asarray(narrow).view(np.uint8)
    assert np.array_equal(bits[finite], expected.view(np.uint8)[finite])


@pytest.mark.parametrize("name", [*FLOATS8, "int8"])
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
def test_numbers_of_8_bits_move_between_devices_as_they_are(name, backend):
    x = md.named(np.arange(48).reshape(8, 6).astype(as_dtype(name)), [n, m])

    def moved(x):
        return md.concat([x, x], "m").rename(m="k"), x.transpose(["m", "n"]), x["n", 2:5]

    split = md.jit(moved, mesh="x:8", layout="n:x", backend=backend)
    for found, expected in zip(split(x), md.jit(moved, backend="numpy")(x), strict=True):
        assert found.dtype == x.dtype
        assert np.array_equal(
            np.asarray(found).astype(np.float32), np.asarray(expected).astype(np.float32)
        )


def test_a_gather_of_8_bits_sends_one_byte_for_each():
    x = md.named(np.ones((8, 6), as_dtype("float8_e4m3fn")), [n, m])
    f = md.jit(lambda x: x.rename(n="rows"), mesh="x:8", layout="n:x")
    (gather,) = f.lower(x).collectives
    assert gather.payload_bytes == 48


@pytest.mark.parametrize("name", FLOATS8)
def test_arithmetic_with_them_is_refused(name):
    x = md.named(np.ones((8, 6), as_dtype(name)), [n, m])
    with pytest.raises(
        ValueError, match=r"got f8e[0-9fmn]*; cast it first, as in md.cast\(x, 'bfl"
    ):
        md.jit(lambda x: x + x)(x)
