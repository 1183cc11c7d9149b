"""What the encoder and the decoder of T5 see, and what its loss is about."""

import jax
import numpy as np

import meshdsl as md
from meshdsl import models
from meshdsl.models import t5

MODEL = models.load("t5_mini", "layers=1,embed=16,heads=2,kv=8,d_ff=32")
PARAMS = md.jit(MODEL.init, backend="numpy")(md.random.key(0))
RNG = np.random.default_rng(0)
DIMS = ["batch", "length"]


def text(length, batch=2):
    return RNG.integers(0, 256, (batch, length)).astype("int32")


def states(source, tokens):
    run = md.jit(lambda p, s, t: t5.states(MODEL.config, p, s, t)[:2], backend="numpy")
    found = run(PARAMS, md.named(source, DIMS), md.named(tokens, DIMS))
    return [np.asarray(array) for array in found]


def changed(before, after):
    """Returns, by position, whether any state of the first text has changed."""
    return np.abs(after - before)[0].max(-1) > 1e-6


def test_the_decoder_sees_all_of_the_source_but_nothing_later_of_its_own():
    source, tokens = text(6), text(4)
    encoded, decoded = states(source, tokens)
    assert encoded.shape == (2, 6, 16) and decoded.shape == (2, 4, 16)
    tokens[0, 2] += 1
    again, moved = states(source, tokens)
    np.testing.assert_array_equal(again, encoded)
    assert list(changed(decoded, moved)) == [False, False, True, True]
    source[0, 5] += 1
    other, all_moved = states(source, tokens)
    assert changed(encoded, other).all() and changed(moved, all_moved).all()


def test_the_loss_is_about_the_second_half_of_a_text():
    tokens, targets = text(12), text(12)
    batch = {"tokens": md.named(tokens, DIMS), "targets": md.named(targets, DIMS)}
    found = md.jit(MODEL.loss, backend="numpy")(PARAMS, batch)
    run = md.jit(lambda p, s, t: t5.logits(MODEL.config, p, s, t), backend="numpy")
    scores = run(PARAMS, md.named(tokens[:, :6], DIMS), md.named(tokens[:, 6:], DIMS))
    order = [scores.dims.names.index(dim) for dim in (*DIMS, "vocab")]
    each = -np.asarray(jax.nn.log_softmax(np.asarray(scores).transpose(order)))
    each = np.take_along_axis(each, targets[:, 6:, None], -1)
    np.testing.assert_allclose(found, each.mean(), rtol=1e-5)
