"""Scores, against the loss of each window by itself, in float64."""

import functools
import math

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.generation import Place, Score, Scorer
from meshdsl.training.data import Documents, DocumentWindows, PackedRows, Tokens

SIZES = "layers=2,embed=16,heads=4,d_ff=8,vocab=61,policy=float64"
EXPERTS = f"{SIZES},capacity=1.25,report_dropped=true,balance_weight=1,router_z_weight=1"
SPLIT = Place("data:2,model:2", "batch:data; heads:model; optimizer/embed:data", "numpy")
ONE = Place(backend="numpy")


def documents():
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 20, 12)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    tokens = Tokens("text", rng.integers(0, 61, bounds[-1]).astype(np.int32), bounds)
    return Documents.of([tokens], 61)


@functools.cache
def trained(name, overrides):
    model = models.load(name, overrides)
    return model, md.jit(model.init, backend="numpy")(md.random.key(0))


def scored(name, overrides, source, place, batch_size, packed=False):
    model, params = trained(name, overrides)
    scorer = Scorer(model, batch_size=batch_size, length=8, packed=packed, place=place)
    scorer.load(params)
    return scorer.score(source)


@pytest.mark.parametrize(("place", "batch_size"), [(ONE, 4), (SPLIT, 4), (ONE, 100)])
def test_every_window_counts_once(place, batch_size):
    windows = DocumentWindows.of(documents(), 8)
    assert len(windows) % 4  # the last batch is smaller
    model, params = trained("gpt_mini", SIZES)
    loss = md.jit(model.loss, backend="numpy")
    each = []
    for number in range(len(windows)):
        batch = windows[np.array([number])]
        batch = {key: md.named(array, ["batch", "length"]) for key, array in batch.items()}
        each.append(float(loss(params, batch)))
    score = scored("gpt_mini", SIZES, windows, place, batch_size)
    assert score.loss == pytest.approx(np.mean(each), rel=1e-6)
    assert (score.examples, score.tokens) == (len(windows), 8 * len(windows))


def test_packed_rows_count_by_their_tokens():
    rows = PackedRows.of(documents(), 8)
    scores = [scored("gpt_mini", SIZES, rows, ONE, size, packed=True) for size in (1, 5)]
    assert scores[0].loss == pytest.approx(scores[1].loss, rel=1e-6)
    assert scores[0].tokens == scores[1].tokens < 8 * len(rows)


def test_losses_of_routers_are_no_part_of_a_score():
    windows = DocumentWindows.of(documents(), 8)
    without = f"{SIZES},capacity=1.25,balance_weight=0,router_z_weight=0"
    found, wanted = (scored("mixtral_mini", o, windows, ONE, 4) for o in (EXPERTS, without))
    assert found.loss == pytest.approx(wanted.loss, rel=1e-9)
    assert found.loss == pytest.approx(math.log(61), rel=0.2)


def test_perplexity_and_bits_follow_from_the_loss():
    score = Score(math.log(8), 1, 10)
    assert (score.perplexity, score.bits) == (pytest.approx(8), pytest.approx(3))
    assert Score(1e4, 1, 1).perplexity == math.inf


def test_no_text_is_a_mistake():
    windows = DocumentWindows.of(documents(), 8)
    with pytest.raises(ValueError, match="too short for one example of 8 tokens"):
        scored("gpt_mini", SIZES, windows.split(1000)[1], ONE, 4)
