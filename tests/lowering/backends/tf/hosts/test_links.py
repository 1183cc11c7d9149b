"""Collectives between host devices, for every dtype: the numpy backend's results, to the bit."""

import itertools

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends.tf.hosts.links import rounds
from tests.lowering.backends.tf.moves import CASES, DTYPES, MOVES, data


def both(function, mesh, layout, *inputs):
    expected = md.jit(function, mesh, layout, "numpy")(*inputs)["out"]
    return np.asarray(md.jit(function, mesh, layout, "tf")(*inputs)["out"]), np.asarray(expected)


@pytest.mark.parametrize("name, move, mesh, layout", CASES, ids=[case[0] for case in CASES])
def test_every_collective_over_one_axis_and_over_two(name, move, mesh, layout):
    x = data("float32")
    program = md.jit(move.function, mesh, layout).lower(x)
    assert move.kind in [collective.kind for collective in program.collectives]
    found, expected = both(move.function, mesh, layout, x)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels_unchanged(dtype):
    x = data(dtype)
    for move in MOVES:
        reduces, kind = "reduce" in move.kind, x.dtype.kind
        if reduces and (kind == "b" or (kind == "c" and move not in MOVES[:5])):
            continue
        found, expected = both(move.function, *move.layouts[-1], x)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_extremes_keep_nan_and_the_signs_of_infinity(dtype):
    x = np.zeros((8, 5))
    x[1, 0], x[2, 1], x[3, 2], x[4, 3], x[:, 4] = np.nan, np.inf, -np.inf, -7, -np.inf
    named = md.named(x.astype(md.spec([], dtype).dtype), ["a", "c"])

    def extremes(x):
        return {"out": md.stack([md.max(x, "a"), md.min(x, "a")], "two")}

    found, expected = both(extremes, "x:4", "a:x", named)
    found, expected = found.astype("f8"), expected.astype("f8")
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found[:, 0]).all() and np.isneginf(found[0, 4])


def test_a_device_that_receives_nothing_has_zeros():
    x = md.named(np.arange(1.0, 9.0), ["a"])
    found, expected = both(lambda x: {"out": md.pad(x, "a", 3, 0)}, "x:4", "a:x", x)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_rounds_partner_every_source_with_its_target(devices):
    for shift in range(1, devices):
        pairs = [(source, (source + shift) % devices) for source in range(devices)]
        for missing in range(3):
            wanted = pairs[missing:]
            found = list(rounds(wanted, devices))
            assert len(found) <= 3
            for partners in found:
                assert all(partners[partners[device]] == device for device in range(devices))
            met = {(d, p) for partners in found for d, p in enumerate(partners)}
            assert met >= set(wanted)


def test_rounds_of_pairs_that_exchange_are_one():
    assert list(rounds([(0, 1), (1, 0), (2, 3), (3, 2)], 5)) == [[1, 0, 3, 2, 4]]
    assert list(itertools.islice(rounds([], 3), 1)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size, sums_in", [(4, "float32"), (40_000, None)])
def test_small_sums_in_half_precision_are_added_up_in_float32(dtype, size, sums_in):
    """Of a large number and many small ones, which are lost one by one, as in large sums."""
    kind = md.spec([], dtype).dtype
    large = 256.0 if dtype == "bfloat16" else 2048.0
    rows = np.ones((8, size), np.float32)
    rows[0] = large
    x = md.named(rows.astype(kind), ["a", "b"])
    found = md.jit(lambda x: {"out": md.sum(x, "a")}, "x:8", "a:x", "tf")(x)["out"]
    assert found.dtype == kind
    exact = rows.sum(0).astype(kind).astype("f8")
    if sums_in:
        np.testing.assert_array_equal(np.asarray(found).astype("f8"), exact)
    else:
        np.testing.assert_allclose(np.asarray(found).astype("f8"), exact, rtol=0.04)
