"""What BERT masks, and what its loss is about."""

import functools

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models import bert

MODEL = models.load("bert_mini", "layers=1,embed=16,heads=2,d_ff=32")
RNG = np.random.default_rng(0)


def text(batch=64, length=128):
    return md.named(RNG.integers(0, 256, (batch, length)).astype("int32"), ["batch", "length"])


def corrupted(tokens, **where):
    found = md.jit(functools.partial(bert.corrupt, MODEL.config), backend="numpy", **where)(tokens)
    return [np.asarray(array) for array in found]


def test_of_the_tokens_15_percent_are_chosen_and_most_of_them_masked():
    tokens = text()
    put, chosen = corrupted(tokens)
    same = put == np.asarray(tokens)
    masked = put == MODEL.config.mask_token
    assert same[~chosen].all()
    assert abs(chosen.mean() - 0.15) < 0.01
    assert abs(masked[chosen].mean() - 0.8) < 0.03
    assert abs(same[chosen].mean() - 0.1) < 0.03
    others = put[chosen & ~masked & ~same]
    assert others.min() >= 0 and others.max() < MODEL.config.vocab
    assert len(np.unique(others)) > 50


def test_the_choice_depends_on_the_tokens_and_on_nothing_else():
    tokens = text(8, 16)
    put, chosen = corrupted(tokens)
    split = corrupted(tokens, mesh="data:2,model:4", layout="batch:data; length:model")
    np.testing.assert_array_equal(split[0], put)
    np.testing.assert_array_equal(split[1], chosen)
    assert (corrupted(text(8, 16))[1] != chosen).any()


def test_the_loss_is_about_the_chosen_tokens_only():
    tokens = text(4, 32)
    params = md.jit(MODEL.init, backend="numpy")(md.random.key(0))
    found = md.jit(MODEL.loss, backend="numpy")(params, {"tokens": tokens, "targets": tokens})
    put, chosen = corrupted(tokens)
    given = md.named(put, ["batch", "length"])
    scores = np.asarray(
        md.jit(
            lambda p, t: bert.logits(MODEL.config, p, t).transpose(["batch", "length", "vocab"]),
            backend="numpy",
        )(params, given)
    )
    each = -np.asarray(jax.nn.log_softmax(scores))
    each = np.take_along_axis(each, np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, each[chosen].mean(), rtol=1e-5)


def test_every_position_sees_every_other():
    tokens = np.asarray(text(1, 8)).copy()
    params = md.jit(MODEL.init, backend="numpy")(md.random.key(0))
    states = md.jit(lambda p, t: bert.states(MODEL.config, p, t)[0], backend="numpy")
    before = np.asarray(states(params, md.named(tokens, ["batch", "length"])))
    tokens[0, 5] += 1
    after = np.asarray(states(params, md.named(tokens, ["batch", "length"])))
    assert (np.abs(after - before).max(-1) > 1e-6).all()


def test_rows_before_the_first_position_are_of_no_token():
    model = models.load("bert_mini", "layers=1,embed=16,heads=2,max_length=12,first_position=3")
    assert model.length == 9
    params = md.jit(model.init, backend="numpy")(md.random.key(0))
    table = np.asarray(params.positions).copy()
    scores = md.jit(lambda p, t: bert.logits(model.config, p, t), backend="numpy")
    tokens = text(1, 9)
    before = np.asarray(scores(params, tokens))
    for row in range(12):
        other = table.copy()
        other[row] += 1 + np.arange(16)
        changed = params.replace(positions=md.named(other, ["max_length", "embed"]))
        same = np.array_equal(np.asarray(scores(changed, tokens)), before)
        assert same == (row < 3), row
    told = r"of which the first 3 are of no position; .*max_length=13"
    with pytest.raises(ValueError, match=told):
        scores(params, text(1, 10))


def test_segments_have_embeddings_of_their_own():
    params = md.jit(MODEL.init, backend="numpy")(md.random.key(0))
    scores = md.jit(lambda p, *t: bert.logits(MODEL.config, p, *t), backend="numpy")
    tokens = text(1, 8)
    kinds = md.named(np.array([[0] * 4 + [1] * 4], "int32"), ["batch", "length"])
    usual, of_two = (np.asarray(scores(params, tokens, *more)) for more in ((), (kinds,)))
    assert np.abs(usual - of_two).max() > 1e-3
    table = np.asarray(params.segments)
    alike = params.replace(segments=md.named(table[[0, 0]], ["segments", "embed"]))
    np.testing.assert_array_equal(np.asarray(scores(alike, tokens, kinds)), usual)
