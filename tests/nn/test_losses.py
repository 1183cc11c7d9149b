"""Cross-entropy, against numpy in float64, and what it moves over a split vocabulary."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 6, 16)) * 3
LABELS = RNG.integers(0, 16, (4, 6)).astype("int32")
DIMS = ["batch", "length", "vocab"]


def probabilities(logits):
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(-1, keepdims=True)


def loss(logits, labels):
    return nn.softmax_cross_entropy(logits, labels)


def arguments(scale=1.0, labels=LABELS):
    return md.named(LOGITS * scale, DIMS), md.named(labels, DIMS[:2])


def test_it_is_minus_the_log_probability_of_the_label():
    found = md.jit(loss)(*arguments())
    expected = -np.log(np.take_along_axis(probabilities(LOGITS), LABELS[..., None], -1))[..., 0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("layout", [None, "batch:data; vocab:model", "vocab:data+model"])
def test_its_gradient_is_the_error_of_the_probabilities(layout):
    def total(logits, labels):
        return md.sum(loss(logits, labels))

    where = {"mesh": "data:2,model:4", "layout": layout, "backend": "numpy"} if layout else {}
    found = md.jit(md.grad(total), **where)(*arguments())
    expected = probabilities(LOGITS) - np.eye(16)[LABELS]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_a_split_vocabulary_moves_numbers_per_position_only():
    def step(logits, labels):
        return md.value_and_grad(lambda x: md.mean(loss(x, labels)))(logits)

    program = md.jit(step, mesh="model:4", layout="vocab:model").lower(*arguments())
    assert program.collectives
    assert max(c.payload_bytes for c in program.collectives) == LABELS.size * 8


def test_large_logits_do_not_overflow():
    found = np.asarray(md.jit(loss)(*arguments(scale=1e4)))
    assert np.isfinite(found).all()
    assert (found >= 0).all()


WRONG = LABELS.copy()
WRONG[1, 2], WRONG[3, 4], WRONG[3, 5] = -1, 16, -1


def test_known_labels_outside_of_the_classes_are_an_error():
    logits, labels = arguments(labels=WRONG)
    for function in (loss, md.jit(lambda x: loss(x, labels))):  # at once, and as a constant
        with pytest.raises(ValueError) as error:
            function(*(logits, labels)[: 2 if function is loss else 1])
        assert (
            "softmax_cross_entropy: 3 of 24 labels are outside of the classes 0 to 15, the first "
            "at batch=1, length=2; give ignore_label=... for those that are to be left out"
        ) in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("layout", "backend"),
    [("", "jax"), ("", "numpy"), ("batch:data; vocab:model", "numpy"), ("vocab:model", "tf")],
)
def test_labels_known_late_give_nan_and_the_gradient_nan_where_they_are_outside(
    layout, backend, dtype
):
    def total(logits, labels):
        return md.sum(loss(logits, labels))

    where = {"mesh": "data:2,model:4", "layout": layout} if layout else {}
    where["backend"] = backend
    wrong = (WRONG < 0) | (WRONG > 15)
    logits, labels = arguments(labels=WRONG)
    logits = md.named(logits.data.astype(dtype), DIMS)
    found = np.asarray(md.jit(loss, **where)(logits, labels))
    assert np.array_equal(np.isnan(found), wrong)
    for scale in (1e-37, 1.0, -1e30):
        slope = md.grad(lambda x, y, scale=scale: total(x, y) * scale)
        gradient = np.asarray(md.jit(slope, **where)(logits, labels))
        assert np.array_equal(np.isnan(gradient).all(-1), wrong)
        assert np.array_equal(np.isnan(gradient).any(-1), wrong)


def test_the_tangent_is_nan_too_where_a_label_is_outside():
    logits, labels = arguments(labels=WRONG)

    def tangent(x, y):
        return md.jvp(lambda x: loss(x, y), (x,), (md.full(x.dims, 1.0, x.dtype),))[1]

    found = md.jit(tangent, backend="numpy")(logits, labels)
    assert np.array_equal(np.isnan(found), (WRONG < 0) | (WRONG > 15))


def test_a_mask_leaves_out_labels_outside_of_the_classes_and_their_gradient():
    def total(logits, labels):
        return nn.mean_where(loss(logits, labels), (labels >= 0) & (labels < 16))

    value, gradient = md.jit(md.value_and_grad(total))(*arguments(labels=WRONG))
    counted = (WRONG >= 0) & (WRONG < 16)
    chances, classes = probabilities(LOGITS), np.eye(16)[np.where(counted, WRONG, 0)]
    each = -np.log((chances * classes).sum(-1))
    np.testing.assert_allclose(value, each[counted].mean(), rtol=1e-12)
    expected = (chances - classes) * counted[..., None] / counted.sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-12)


def test_mistakes_are_reported_at_the_line_of_the_user():
    line = loss.__code__.co_firstlineno + 1
    for labels in (LABELS.astype("f4"), WRONG):
        with pytest.raises(ValueError, match="softmax_cross_entropy: ") as error:
            loss(*arguments(labels=labels))
        assert f"  at tests/nn/test_losses.py:{line}  return nn." in str(error.value)
    with pytest.raises(ValueError, match="softmax_cross_entropy: ") as error:
        md.jit(loss)(*arguments(labels=LABELS.astype("f4")))
    assert f"  at tests/nn/test_losses.py:{line}  return nn." in str(error.value)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64"])
def test_a_label_to_ignore_may_be_none_of_the_labels_dtype(dtype):
    ignored = -1 if dtype[0] == "u" else 2**70
    logits, labels = arguments(labels=LABELS.astype(dtype))
    found = md.jit(lambda x, y: nn.softmax_cross_entropy(x, y, ignore_label=ignored))(
        logits, labels
    )
    np.testing.assert_array_equal(found, md.jit(loss)(*arguments()))


@pytest.mark.parametrize("ignored", [-1, 3])
@pytest.mark.parametrize("layout", ["", "batch:data; vocab:model", "length:data+model"])
def test_positions_with_the_label_to_ignore_do_not_count(layout, ignored):
    counted = LABELS != 3
    labels = np.where(counted, LABELS, ignored)

    def total(logits, labels):
        each = nn.softmax_cross_entropy(logits, labels, ignore_label=ignored)
        return nn.mean_where(each, labels != ignored)

    where = {"mesh": "data:2,model:4", "layout": layout, "backend": "numpy"} if layout else {}
    value, gradient = md.jit(md.value_and_grad(total), **where)(*arguments(labels=labels))
    chances = probabilities(LOGITS)
    each = -np.log(np.take_along_axis(chances, LABELS[..., None], -1))[..., 0]
    np.testing.assert_allclose(value, each[counted].mean(), rtol=1e-12)
    expected = (chances - np.eye(16)[LABELS]) * counted[..., None] / counted.sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-12)
    if not layout:
        at_once = nn.softmax_cross_entropy(*arguments(labels=labels), ignore_label=ignored)
        assert np.array_equal(np.asarray(at_once) == 0, ~counted)


def test_the_mean_where_nothing_counts_is_zero():
    x = md.named(np.float64([[1, 2], [3, 5]]), ["row", "column"])
    mask = md.named(np.array([True, False]), ["row"])
    found = md.jit(lambda x, m: (nn.mean_where(x, m), nn.mean_where(x, m, "column")))(x, mask)
    assert float(found[0]) == 1.5
    assert np.array_equal(found[1], [1.5, 0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mean_in_half_precision_counts_in_float32(dtype):
    x = md.named(np.full(70_000, 2, "f4"), ["row"])
    mask = md.named(np.arange(70_000) % 70 > 0, ["row"])
    found = md.jit(lambda x, m: nn.mean_where(md.cast(x, dtype), m))(x, mask)
    assert found.dtype.name == dtype
    assert float(found) == 2


def test_half_precision_is_summed_in_float32():
    found = md.jit(lambda x, y: loss(md.cast(x, "bfloat16"), y))(*arguments())
    assert found.dtype.name == "float32"


def test_labels_must_be_integers_and_have_no_other_dims():
    logits, _ = arguments()
    with pytest.raises(ValueError, match="softmax_cross_entropy: no dim `vocabulary`"):
        md.jit(lambda x, y: nn.softmax_cross_entropy(x, y, over="vocabulary"))(*arguments())
    with pytest.raises(ValueError, match="labels are integers, got f64"):
        md.jit(loss)(logits, md.named(LABELS.astype(float), DIMS[:2]))
    with pytest.raises(ValueError, match=r"labels have dims \[lenght=6\] that the logits .* lack"):
        md.jit(loss)(logits, md.named(LABELS, ["batch", "lenght"]))


def test_labels_may_have_a_dtype_narrower_than_the_vocabulary():
    batch, vocab = md.dims(batch=2, vocab=300)
    logits = np.zeros((2, 300), "f4")
    logits[:, 256] = 10
    narrow = md.named(np.zeros(2, "u1"), [batch])
    wide = md.named(np.zeros(2, "i4"), [batch])
    loss = md.jit(lambda x, y: nn.softmax_cross_entropy(x, y, over="vocab"))
    logits = md.named(logits, [batch, vocab])
    np.testing.assert_array_equal(loss(logits, narrow), loss(logits, wide))


@pytest.mark.parametrize("ignored", [float("nan"), "1", 1.5])
def test_an_ignored_label_that_is_no_integer_is_refused(ignored):
    function = md.jit(
        lambda x, y: nn.softmax_cross_entropy(x, y, ignore_label=ignored), backend="numpy"
    )
    with pytest.raises(ValueError, match="ignore_label is an integer, got"):
        function(*arguments())
