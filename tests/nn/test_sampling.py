"""Sampling, against numpy in float64, on every layout."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn

VOCAB = 23
BATCH, CHOICES = md.dims(batch=4, vocab=VOCAB)
SPLIT = {"mesh": "data:2,model:3", "layout": "batch:data; vocab:model"}
WHERE = [{"backend": "numpy"}, {"backend": "numpy", **SPLIT}, SPLIT]


def kept(scores, top_k=0, top_p=1.0, min_p=0.0):
    """Returns which scores of a row may be drawn, as the papers say."""
    order = np.argsort(-scores)
    keep = np.ones(len(scores), bool)
    if top_k:
        keep[order[top_k:]] = False
    chances = np.where(keep, np.exp(scores - scores.max()), 0)
    chances /= chances.sum()
    if top_p < 1:
        total = 0.0
        for token in order:
            keep[token] &= total < top_p
            total += chances[token]
    return keep & (chances >= min_p * chances.max())


@pytest.mark.long
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": [1, 3, 0, 30]},
        {"top_p": [0.1, 0.5, 0.9, 1.0]},
        {"min_p": [0.0, 0.05, 0.3, 1.0]},
        {"top_k": [5, 0, 2, 8], "top_p": [0.7, 0.6, 0.9, 1.0], "min_p": [0.1, 0.0, 0.2, 0.3]},
    ],
)
def test_what_filters_keep_is_drawn_and_nothing_else(filters, where):
    rng = np.random.default_rng(0)
    scores = 2 * rng.normal(size=(4, VOCAB))
    heat = np.array([1.0, 0.5, 2.0, 1.0])
    kinds = {"top_k": "int32", "top_p": "float32", "min_p": "float32"}
    given = {n: md.named(np.array(v, kinds[n]), ["batch"]) for n, v in filters.items()}

    @md.jit(**where)
    def draw(scores, heat, key, given):
        noise = nn.row_noise(key, md.arange(BATCH), CHOICES)
        return nn.sample(scores, "vocab", noise, heat, **given)

    named = md.named(scores, [BATCH, CHOICES]), md.named(heat, [BATCH])
    drawn = [np.asarray(draw(*named, md.random.key(seed), given)) for seed in range(150)]
    for row in range(4):
        mine = {name: values[row] for name, values in filters.items()}
        may = set(np.flatnonzero(kept(scores[row] / heat[row], **mine)))
        got = {int(each[row]) for each in drawn}
        assert got <= may
        assert len(got) == len(may) or len(may) > 4  # rare ones may not be met


@pytest.mark.parametrize("where", WHERE)
def test_where_no_row_asks_for_a_filter_nothing_is_sorted_and_draws_are_the_same(where):
    rng = np.random.default_rng(1)
    scores = md.named(rng.normal(size=(4, VOCAB)).astype(np.float32), [BATCH, CHOICES])

    def draw(scores, key, filters):
        noise = nn.row_noise(key, md.arange(BATCH), CHOICES)
        return nn.sample(scores, "vocab", noise, 0.7, **filters)

    def filters(top_k, top_p):
        rows = {"top_k": np.array(top_k, "int32"), "top_p": np.array(top_p, "float32")}
        return {name: md.named(values, ["batch"]) for name, values in rows.items()}

    filtered, plain = md.jit(draw, **where), md.jit(draw, **where)
    program = filtered.lower(scores, md.random.key(0), filters([0] * 4, [1] * 4))
    kinds = [instruction.op for instruction in program.block.instructions]
    assert "cond" in kinds and "sort" not in kinds
    differs = False
    for seed in range(20):
        key = md.random.key(seed)
        wanted = np.asarray(plain(scores, key, {}))
        assert np.array_equal(np.asarray(filtered(scores, key, filters([0] * 4, [1] * 4))), wanted)
        one = np.asarray(filtered(scores, key, filters([0, 1, 0, 0], [1] * 4)))
        assert np.array_equal(np.delete(one, 1), np.delete(wanted, 1))
        differs |= one[1] != wanted[1]
    assert differs


def test_draws_have_the_probabilities_of_the_scores():
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    rows, vocab = md.dims(rows=20_000, vocab=4)

    @md.jit(backend="numpy")
    def draw(scores, key):
        noise = nn.row_noise(key, md.arange(rows), vocab)
        return nn.sample(md.broadcast(scores, [rows, vocab]), vocab, noise, 2.0)

    drawn = np.asarray(draw(md.named(scores, [vocab]), md.random.key(0)))
    wanted = np.exp(scores / 2) / np.exp(scores / 2).sum()
    np.testing.assert_allclose(np.bincount(drawn) / 20_000, wanted, atol=0.015)


def test_a_text_has_the_same_noise_in_every_batch_and_layout():
    def noise(numbers, **where):
        make = md.jit(lambda rows, key: nn.row_noise(key, rows, CHOICES), **where)
        rows = md.named(np.array(numbers, "uint32"), ["batch"])
        return np.asarray(make(rows, md.random.key(7)))

    one = noise([0, 1, 5_000, 9], backend="numpy")
    np.testing.assert_allclose(noise([9, 5_000], backend="numpy"), one[[3, 2]])
    np.testing.assert_allclose(noise([0, 1, 5_000, 9], **SPLIT), one, rtol=1e-6, atol=1e-6)
    assert len(np.unique(one)) == one.size


@pytest.mark.parametrize("where", WHERE)
def test_without_noise_or_heat_the_largest_score_is_taken(where):
    scores = md.named(np.random.default_rng(1).normal(size=(4, VOCAB)), [BATCH, CHOICES])

    @md.jit(**where)
    def draw(scores, heat, key):
        noise = nn.row_noise(key, md.arange(BATCH), CHOICES)
        return nn.sample(scores, "vocab"), nn.sample(scores, "vocab", noise, heat)

    cold = md.named(np.array([0.0, 0.0, 1e-6, 0.0], "float32"), [BATCH])
    for drawn in draw(scores, cold, md.random.key(3)):
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(scores).argmax(-1))


def test_seen_tokens_are_less_likely():
    scores = md.named(np.array([2.0, -2.0, 3.0]), ["vocab"])
    seen = md.named(np.array([True, True, False]), ["vocab"])
    found = md.jit(lambda s, n: nn.penalise_seen(s, n, 2.0), backend="numpy")(scores, seen)
    np.testing.assert_allclose(np.asarray(found), [1.0, -4.0, 3.0])
