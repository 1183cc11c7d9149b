"""The promise of the project: the same losses on every layout and mesh."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models, optim
from meshdsl.training.data import ByteCorpus, shuffled_batches, text_files
from meshdsl.training.loop import train

TENSOR = "heads:model; d_ff:model; vocab:model"
LAYOUTS = {
    "data": ("data:8", "batch:data"),
    "model": ("model:8", TENSOR),
    "data and model": ("data:2 model:4", f"batch:data; {TENSOR}"),
    "sequence": ("data:2 model:4", f"batch:data; {TENSOR}; length:model?"),
    "two axes on one dim": ("slice:2 data:2 model:2", f"batch:slice+data; {TENSOR}"),
    "two axes on the model": ("data:2 a:2 b:2", "batch:data; heads:a+b; d_ff:b+a; vocab:a+b"),
    "embed": ("data:4 model:2", "batch:data; embed:model"),
    "scoped": ("data:4 model:2", f"batch:data; {TENSOR}; params/embed:data; optimizer/embed:data"),
    "length": ("context:4 model:2", f"length:context; {TENSOR}"),
}


def losses(model, steps, mesh=None, layout=None):
    with jax.enable_x64(False):
        corpus = ByteCorpus.read(text_files(None)[:100])
        windows, _ = corpus.split(model.length, batch_size=model.batch_size)
        return train(
            model.init,
            model.loss,
            optim.AdamW(1e-3, weight_decay=0.1),
            shuffled_batches(windows, model.batch_size, seed=0),
            steps=steps,
            mesh=mesh,
            layout=layout,
            clip_norm=1.0,
            batch_dims={"tokens": ["batch", "length"], "targets": ["batch", "length"]},
            quiet=True,
        ).losses


SMALL = "layers=2,embed=64,heads=8,d_ff=128"


@pytest.fixture(scope="module")
def unsharded():
    return losses(models.load("gpt_mini", SMALL), 10)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_losses_of_a_small_model_are_those_of_one_device(name, unsharded):
    mesh, layout = LAYOUTS[name]
    assert md.Mesh.parse(mesh).size == 8
    np.testing.assert_allclose(
        losses(models.load("gpt_mini", SMALL), 10, mesh, layout), unsharded, atol=2e-5
    )


@pytest.fixture(scope="module")
def gpt_mini_unsharded():
    return losses(models.load("gpt_mini"), 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_fifty_losses_of_gpt_mini_are_those_of_one_device(name, gpt_mini_unsharded):
    found = losses(models.load("gpt_mini"), 50, *LAYOUTS[name])
    np.testing.assert_allclose(found, gpt_mini_unsharded, atol=2e-5)
