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


def test_a_label_outside_of_the_classes_chooses_nothing():
    found = md.jit(loss)(*arguments(labels=np.full_like(LABELS, -1)))
    np.testing.assert_allclose(found, np.log(np.exp(LOGITS).sum(-1)), rtol=1e-12)


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
