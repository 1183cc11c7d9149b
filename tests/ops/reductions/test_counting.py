"""Counting and finding, against numpy."""

import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_close, message, random, run
from tests.ops.layouts import assert_same_values_on_every_layout

batch, length = md.dims(batch=3, length=7)
found, bins = md.dims(found=4, bin=5)
NUMBERS = np.random.default_rng(0).integers(-2, 7, (3, 7))
INDICES = md.named(NUMBERS, [batch, length])
X = md.named(np.random.default_rng(1).integers(-4, 12, (3, 7)) / 2, [batch, length])
EDGES = [0.0, 0.5, 1.0, 3.0, 4.5, 5.0]


def test_counts_of_what_is_not_zero():
    result = run(lambda x: [md.count_nonzero(x), md.count_nonzero(x > 2, "length")], INDICES)
    assert int(result[0]) == np.count_nonzero(NUMBERS)
    assert np.array_equal(result[1], np.count_nonzero(NUMBERS > 2, 1))


def test_counts_of_indices_and_their_weights():
    weights = random([length])

    def model(i, w):
        return md.bincount(i, bins), md.bincount(i, bins, "length"), md.bincount(i, bins, None, w)

    total, rows, weighted = run(model, INDICES, weights)
    assert np.array_equal(total, [(n == NUMBERS).sum() for n in range(5)])
    assert np.array_equal(rows, [[(row == n).sum() for n in range(5)] for row in NUMBERS])
    assert rows.dims.names == ("batch", "bin")
    assert_close(weighted, [((n == NUMBERS) * weights.data).sum() for n in range(5)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_places_in_a_sorted_tensor(side):
    ordered = md.named(np.array([-1.0, 0.5, 0.5, 2.0, np.inf, np.nan, np.nan]), ["edge"])
    values = np.array([-2.0, -1.0, 0.5, 0.7, np.inf, np.nan, -np.inf])
    result = run(lambda o, v: md.searchsorted(o, v, side=side), ordered, md.named(values, ["v"]))
    assert np.array_equal(result, np.searchsorted(ordered.data, values, side))
    rows = md.named(np.sort(X.data), [batch, length])
    each = md.named(np.array([0.0, 1.5, 9.0]), [batch])
    result = run(lambda o, v: md.searchsorted(o, v, "length", side), rows, each)
    expected = [np.searchsorted(r, v, side) for r, v in zip(rows.data, each.data, strict=True)]
    assert np.array_equal(result, expected)


def test_histograms():
    odd = X.data.copy()
    odd[0, :2] = np.nan, np.inf
    x = md.named(odd, [batch, length])
    counts = run(lambda x: md.histogram(x, EDGES), x)
    assert np.array_equal(counts, np.histogram(odd[np.isfinite(odd)], EDGES)[0])
    assert counts.dtype == np.int32
    edges = md.named(np.array(EDGES), ["length"])  # a dim that x has too
    rows = run(lambda x, e: md.histogram(x, e, "level", over="length"), x, edges)
    expected = [np.histogram(row[np.isfinite(row)], EDGES)[0] for row in odd]
    assert np.array_equal(rows, expected)
    assert rows.dims.names == ("batch", "level")
    open_ended = run(lambda x: md.histogram(x, [-np.inf, 1.0, np.inf]), X)
    assert np.array_equal(open_ended, [(X.data < 1).sum(), (X.data >= 1).sum()])


def test_where_a_mask_holds():
    def model(x):
        mask = x > 2
        return md.nonzero(mask, "length", found), md.nonzero(mask, length, found, fill=7)

    usual, filled = run(model, INDICES)
    assert usual.dims.names == ("batch", "found")
    assert usual.dtype == np.int32
    for row, mine, other in zip(NUMBERS > 2, usual.data, filled.data, strict=True):
        places = np.flatnonzero(row)[:4]
        assert np.array_equal(mine, [*places, *[-1] * (4 - len(places))])
        assert np.array_equal(other, [*places, *[7] * (4 - len(places))])


def test_every_layout_counts_the_same():
    def model(i, x):
        return [
            md.count_nonzero(i, "length"),
            md.bincount(i, bins),
            md.bincount(i, md.Dimension("length", 5), "length"),
            md.histogram(x, EDGES, over="length"),
            md.searchsorted(md.sort(x, "length"), md.mean(x, "length"), "length"),
            md.nonzero(i > 2, "length", found),
            md.nonzero(i > 2, "length", md.Dimension("length", 3)),
        ]

    layouts = [
        ("x:2,y:2", "length:x+y"),
        ("x:4,y:2", "length:x; batch:y"),
        ("x:2,y:3", "length:x; bin:y; found:y"),
    ]
    assert_same_values_on_every_layout(model, INDICES, X, layouts=layouts)


def test_mistakes_are_told():
    for function, text in [
        (lambda i, x: md.searchsorted(x, x), "give the dim along which [batch=3, length=7] is"),
        (lambda i, x: md.searchsorted(x, x, "length"), "the values have dim `length` as well"),
        (lambda i, x: md.searchsorted(x, x, "length", "top"), "side must be 'left' or 'right', no"),
        (lambda i, x: md.histogram(x, [[1.0]]), "edges must be a list of numbers, or a tensor"),
        (lambda i, x: md.histogram(x, [2, 1, 3]), "the edges [2, 1, 3] fall somewhere; sort them"),
        (lambda i, x: md.histogram(x, [1.0]), "edges need one dim, of size 2 or more, not [edges_"),
        (lambda i, x: md.histogram(i, x), "edges need one dim, of size 2 or more, not [batch=3"),
        (lambda i, x: md.histogram(i, md.sum(x, "batch")), "edges are f64, but x is s64; cast one"),
        (lambda i, x: md.histogram(x, [0, 1], bins), "2 edges make 1 bins, not bin=5"),
        (lambda i, x: md.histogram(i, [0, 0.5, 1.5]), "the edges [0, 0.5, 1.5] would be rounded"),
        (lambda i, x: md.histogram(i.cast("uint8"), [0, 300]), "rounded to u8; cast x first"),
        (lambda i, x: md.nonzero(x, "length", found), "nonzero: needs a bool tensor, got f64"),
        (lambda i, x: md.nonzero(x > 0, "length", "found"), "'found' has no size here; give a md"),
        (
            lambda i, x: md.bincount(i, bins, weights=x["length", 0].rename(batch="bacth")),
            "have `bacth`, which the tensor of indices s64[batch=3, length=7] lacks. Did you mean "
            "`batch` instead of `bacth`?",
        ),
        (lambda i, x: md.bincount(x, bins), "bincount: the indices must be integers, got f64"),
    ]:
        assert text in message(function, INDICES, X)
