"""Every family learns: text from the standard library's sources, or pictures, on split meshes.

The loss falls far below that of a guess that knows how often each byte, or class, occurs.
"""

import itertools

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models, optim
from meshdsl.models import resnet
from meshdsl.training import Recipe, Reporting, train
from meshdsl.training.data import text_files
from tests.models.shapes import pictures

TEXT = b"".join(file.read_bytes() for file in text_files()[:40])
TENSOR = "batch:data; heads:model; d_ff:model; vocab:model"
QUIET = Reporting(quiet=True)
SMALL = "layers=1,embed=64,heads=2,d_ff=128"
RUNS = {
    "t5": ("t5_mini", f"{SMALL}", "data:2,model:2", TENSOR),
    "experts": (
        "mixtral_mini",
        f"{SMALL},experts=4",
        "data:2,expert:2",
        "batch:data+expert?; experts:expert",
    ),
    "dropless experts": (
        "mixtral_mini",
        f"{SMALL},experts=4,capacity=none,dispatch=sort",
        "data:4",
        "batch:data; params/embed:data",
    ),
    "latent attention": (
        "deepseek_mini",
        f"{SMALL},kv=16,kv_rank=24,query_rank=24,experts=4,dense_layers=0",
        "data:2,model:2",
        "batch:data; heads:model; d_ff:model",
    ),
}


def texts(model, batch_size=32, length=32):
    """Yields random pieces of the text, and for each of their bytes the one that follows."""
    rng = np.random.default_rng(0)
    data = np.frombuffer(TEXT, np.uint8).astype("int32")
    dims = model.batch_spec(batch_size, length)["tokens"].dims
    while True:
        starts = rng.integers(0, len(data) - length - 1, batch_size)
        rows = starts[:, None] + np.arange(length)
        yield {"tokens": md.named(data[rows], dims), "targets": md.named(data[rows + 1], dims)}


SLOW = ("dropless experts", "latent attention")


@pytest.mark.long
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.slow) if run in SLOW else run for run in RUNS]
)
def test_language_models_learn(run):
    name, overrides, mesh, layout = RUNS[run]
    model = models.load(name, overrides)
    result = train(
        Recipe(model.init, model.loss, optim.AdamW(5e-3)),
        texts(model),
        steps=40,
        mesh=mesh,
        layout=layout,
        reporting=QUIET,
    )
    counts = np.bincount(np.frombuffer(TEXT, np.uint8))
    shares = counts[counts > 0] / counts.sum()
    guess = -(shares * np.log(shares)).sum()
    assert result.losses[0] > 5
    assert np.mean(result.losses[-8:]) < guess - 0.1


def pairs_of_symbols(batch_size=32, length=32, symbols=64):
    """Yields rows of two symbols each, so that what is masked is known from what is not."""
    rng = np.random.default_rng(0)
    while True:
        own = rng.integers(0, symbols, (batch_size, 2))
        rows = np.take_along_axis(own, rng.integers(0, 2, (batch_size, length)), 1)
        tokens = md.named(rows.astype("int32"), ["batch", "length"])
        yield {"tokens": tokens, "targets": tokens}


@pytest.mark.long
def test_an_encoder_learns_to_fill_in_from_both_sides():
    model = models.load("bert_mini", SMALL)
    result = train(
        Recipe(model.init, model.loss, optim.AdamW(3e-3)),
        pairs_of_symbols(),
        steps=60,
        mesh="data:2,model:2",
        layout=TENSOR,
        reporting=QUIET,
    )
    assert np.mean(result.losses[-5:]) < np.log(64) - 0.5


@pytest.mark.long
def test_a_residual_network_learns_and_then_needs_no_batch():
    """In inference, statistics kept from training stand for those of the batch."""
    model = models.load("resnet_mini", "stem=8,filters=8+16")
    where = {"mesh": "data:2,rows:2", "layout": "batch:data; height:rows"}
    batches = list(itertools.islice(pictures(32, 24), 40))
    recipe = Recipe(model.init, model.loss, optim.AdamW(1e-2))
    result = train(recipe, batches, steps=40, reporting=QUIET, **where)
    assert result.losses[0] > 1.2
    assert np.mean(result.losses[-5:]) < 0.7
    params = jax.tree.map(np.asarray, result.state.params)

    def statistics(params, several):
        return resnet.mean_statistics(
            [resnet.features(model.config, params, one["image"])[1] for one in several]
        )

    kept = md.jit(statistics)(params, batches[-4:])
    scores = md.jit(
        lambda params, image, kept: resnet.logits(model.config, params, image, kept), **where
    )
    test = next(pictures(128, 24, seed=1))
    found = np.asarray(scores(params, test["image"], kept))
    assert (found.argmax(1) == np.asarray(test["label"])).mean() > 0.7
    # Each picture by itself gets the same scores.
    one = md.named(np.asarray(test["image"])[:4], test["image"].dims.names)
    np.testing.assert_allclose(scores(params, one, kept), found[:4], rtol=1e-4, atol=1e-4)
