"""Sums, extremes and means of segments, against loops over them."""

import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_close, message, random, run
from tests.ops.layouts import assert_same_on_every_layout

batch, embed = md.dims(batch=3, embed=4)


def test_segments():
    x, into = random([batch, md.Dimension("item", 4), embed]), md.Dimension("segment", 5)
    of = md.named(np.array([[0, 3, 3, 9], [1, 1, -1, 1], [4, 0, 4, 0]]), [batch, "item"])

    def model(x, of):
        kinds = (md.segment_sum, md.segment_mean, md.segment_max, md.segment_min)
        kept = [kind(x, of, into, over="item") for kind in kinds]
        return kept, [kind(x, of, into) for kind in kinds]

    kept, total = run(model, x, of)
    assert kept[0].dims.names == ("batch", "segment", "embed")
    assert total[0].dims.names == ("segment", "embed")
    for each, reduce, empty in zip(
        range(4), (np.sum, np.mean, np.max, np.min), (0, 0, -np.inf, np.inf), strict=True
    ):
        for s in range(5):
            found = x.data[of.data == s]
            assert_close(total[each].data[s], reduce(found, 0) if len(found) else [empty] * 4)
            for b in range(3):
                found = x.data[b][of.data[b] == s]
                expected = reduce(found, 0) if len(found) else [empty] * 4
                assert_close(kept[each].data[b, s], expected)


def test_the_gradients_of_segments():
    x, into = random([md.Dimension("item", 5)]), md.Dimension("segment", 3)
    of = md.named(np.array([0, 2, 2, 0, 7]), ["item"])

    def gradient(kind):
        weights = md.named(np.array([1.0, 0.0, 3.0]), [into])

        def total(x, of):
            found = kind(x, of, into)
            return md.sum(md.where(md.isfinite(found), found, 0) * weights)

        return run(md.grad(total), x, of).data

    assert_close(gradient(md.segment_sum), [1, 3, 3, 1, 0])
    assert_close(gradient(md.segment_mean), [0.5, 1.5, 1.5, 0.5, 0])
    most = np.where(x.data == np.maximum(x.data[[0, 1, 1, 0, 4]], x.data[[3, 2, 2, 3, 4]]), 1, 0)
    assert_close(gradient(md.segment_max), most * [1, 3, 3, 1, 0])
    assert_close(gradient(md.segment_min), (1 - most) * [1, 3, 3, 1, 0])


def test_every_layout_gives_the_same():
    item, into = md.Dimension("length", 7), md.Dimension("segment", 5)
    x = random([batch, item])
    of = md.named(np.random.default_rng(1).integers(-1, 6, (3, 7)), [batch, item])
    functions = [
        lambda x, of: md.segment_sum(x, of, into),
        lambda x, of: md.segment_mean(x, of, into),
        lambda x, of: md.segment_sum(x, of, md.Dimension("length", 5), over="length"),
        lambda x, of: md.segment_max(x, of % 3, md.Dimension("length", 3), over="length"),
        lambda x, of: md.segment_min(x, of % 2, md.Dimension("batch", 2)),
    ]
    assert_same_on_every_layout(functions, x, of)


def test_mistakes_are_told():
    table = random([md.Dimension("vocab", 6), embed])
    indices = md.named(np.zeros((3, 2), np.int32), [batch, "length"])
    vocab = table.dims[0]
    for function, text in [
        (
            lambda t, i: md.segment_sum(t > 0, i, vocab),
            "segment_sum: needs numbers, got bool; cast first, as in md.cast(x, 'int32')",
        ),
        (
            lambda t, i: md.segment_sum(t, i.rename(length="embed"), vocab),
            "segment_sum: dim `embed` has size 4 in x but 2 in the segments",
        ),
        (
            lambda t, i: md.segment_sum(t, md.cast(t["vocab", 0], "int32"), vocab),
            "`vocab` occurs twice",
        ),
        (
            lambda t, i: md.segment_sum(t, i["batch", 0].rename(length="vocb"), vocab),
            "segment_sum: the segments s32[vocb=2] have `vocb`, which x f64[vocab=6, embed=4] "
            "lacks. Did you mean `vocab` instead of `vocb`? If it is meant, broadcast x first",
        ),
        (
            lambda t, i: md.segment_mean(t, i["batch", 0], vocab),
            "segment_mean: the segments s32[length=2] have `length`, which x f64[vocab=6, em",
        ),
        (lambda t, i: md.segment_mean(i, i, vocab), "needs a floating-point tensor, got s32"),
        (
            lambda t, i: md.segment_max(md.cast(t, "complex64"), i["batch", 0], vocab),
            "segment_max: complex numbers have no order, got c64; take a part, as in md.real(x)",
        ),
        (
            lambda t, i: md.segment_min(md.cast(t, "complex64"), i["batch", 0], vocab),
            "segment_min: complex numbers have no order",
        ),
    ]:
        assert text in message(function, table, indices)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_half_precision_is_summed_in_float32(backend):
    """One after the other, ones add up to 256 in bfloat16, and to no more."""
    many, table = md.dims(many=1000, table=2)

    def model():
        ones, first = md.ones([many], "bfloat16"), md.zeros([many], "int32")
        looked_up = md.grad(lambda x: md.sum(md.take(x, first, "table")))
        return md.segment_sum(ones, first, table), looked_up(md.ones([table], "bfloat16"))

    for found in run(model, backend=backend):
        assert np.asarray(found).tolist() == [1000, 0]


@pytest.mark.optimized  # it is about rounding
@pytest.mark.parametrize("kind", [md.segment_max, md.segment_min])
def test_gradients_of_extremes_close_to_0_after_a_cancellation(kind):
    """XLA rounds a multiply-add in two ways, and after it no update may equal the extreme."""
    rows, item, segment = md.dims(row=4096, item=8, segment=2)
    sign = 1 if kind is md.segment_max else -1
    rng = np.random.default_rng(0)
    a, p = (rng.normal(size=(4096, 8)).astype(np.float32) for _ in range(2))
    away = rng.uniform(0.5, 2, (4096, 8))
    away[:, 1] = 0  # where a p + q is 0, up to rounding
    q = (-a.astype(np.float64) * p - sign * away).astype(np.float32)

    def loss(shift, a, p, q):
        return md.sum(kind(a * p + q + shift, md.arange(item) // 4, segment))

    given = [md.named(x, [rows, item]) for x in (a, p, q)]
    shift = md.named(np.zeros(4096, np.float32), [rows])
    for backend in ("jax", "jax_auto"):
        slope = md.jit(md.grad(loss), "m:4", "item:m", backend=backend)(shift, *given)
        np.testing.assert_array_equal(slope, 2)
