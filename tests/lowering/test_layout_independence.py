"""Corners in which a layout once changed the result: each of these was a bug."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors import dtypes

MESH = "m:2"


def agree(function, *arrays, layouts):
    expected = np.asarray(md.jit(function, backend="numpy")(*arrays))
    for layout in layouts:
        for backend in ("numpy", "jax"):
            found = np.asarray(md.jit(function, MESH, layout, backend)(*arrays))
            assert found.dtype == expected.dtype
            told = f"{layout} on {backend}"
            np.testing.assert_array_equal(found.astype("f8"), expected.astype("f8"), told)
    return expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["max", "min"])
def test_nan_wins_a_maximum_over_a_split_dim(name, dtype):
    x = md.named(
        np.array([[1, np.nan, 3, 4], [-1, -0.5, -np.inf, np.inf]]).astype(dtypes.as_dtype(dtype)),
        ["b", "a"],
    )
    found = agree(lambda x: getattr(md, name)(x, "a"), x, layouts=["a:m", "b:m"])
    assert np.isnan(found[0].astype("f4"))
    assert found[1].astype("f4") == (np.inf if name == "max" else -np.inf)


def test_a_sum_is_not_cast_to_a_dtype_of_less_range_before_it_is_whole():
    x = md.named(np.array([60000, 60000, -60000, -60000], "f4"), ["k"])

    def through_half(x):
        return md.cast(md.sum(md.cast(x, "bfloat16"), "k"), "float16")

    assert agree(through_half, x, layouts=["k:m"]) == 0


def test_a_table_of_flags_split_over_its_rows_gives_flags():
    table = md.named(np.array([True, False, True, False]), ["v"])
    ids = md.named(np.array([0, 1, 2, 3], "i4"), ["a"])

    def look_up(table, ids):
        return md.take(table, ids, "v")

    found = agree(look_up, table, ids, layouts=["v:m", "v:m; a:m?"])
    assert found.tolist() == [True, False, True, False]


def test_a_nan_in_bfloat16_comes_out_of_the_reference_backend():
    x = md.named(np.array([-1, 1]).astype(dtypes.BFLOAT16), ["v"])
    found = md.jit(lambda x: (md.sum(md.log(x)), x), MESH, "v:m", "numpy")(x)
    assert np.isnan(float(found[0]))


def test_a_masked_operand_is_not_taken_for_a_partial_sum():
    """The partial sum stays partial to the end, whichever way a product is written."""
    k, j = md.dims(k=8, j=64)
    x, w = md.spec([k], "float32"), md.spec([k, j], "float32")
    y, z = md.spec([j], "float32"), md.spec([j], "float32")

    def one_way(x, w, y, z):
        p = md.einsum(x, w, over="k")
        return md.sum((p + y) * z) + md.sum(p * y)

    def other_way(x, w, y, z):
        p = md.einsum(x, w, over="k")
        return md.sum((p + y) * z) + md.sum(y * p)

    for function in (one_way, other_way):
        program = md.jit(function, MESH, "k:m").lower(x, w, y, z)
        assert [c.payload_bytes for c in program.collectives] == [4]
