"""The promise of the project: the same losses on every layout and mesh."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models, optim
from meshdsl.lowering.options import Options
from meshdsl.training.data import Bytes, Documents, DocumentWindows, shuffled_batches, text_files
from meshdsl.training.data.tokenizing import read_tokens
from tests.training.flat import train

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
# No size of the model divides by the axes that split it; nor does the batch of 16 by 5.
UNEVEN = {
    "data": ("data:5", "batch:data"),
    "sequence": ("data:2 model:4", f"batch:data; {TENSOR}; length:model?"),
    "scoped": (
        "data:4 a:2",
        "batch:data; heads:a; d_ff:a; vocab:a; params/embed:data; optimizer/embed:data+a?",
    ),
}


RING = "length:context; memory_length:context"
# Context parallelism: the mesh, the layout, changes to the model, and what is asked for.
CONTEXT = {
    "whatever is best": ("context:8", RING, "", Options()),
    "ring": ("context:4 model:2", f"{RING}; {TENSOR}", "", Options(context="ring")),
    "rotary": ("context:8", RING, "positions=rotary", Options(context="ring", zigzag=True)),
    "uneven": ("context:5", RING, "", Options(context="ring", zigzag=True)),
}


def losses(model, steps, mesh=None, layout=None, options=None, backend="jax"):
    with jax.enable_x64(False):
        documents = Documents.of(read_tokens(text_files(None)[:100], Bytes(), []), 256)
        windows, _ = DocumentWindows.of(documents, model.length).split()
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
            options=options,
            backend=backend,
        ).losses


SMALL = "layers=2,embed=64,heads=8,d_ff=128"


@pytest.fixture(scope="module")
def unsharded():
    return losses(models.load("gpt_mini", SMALL), 10)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_losses_of_a_small_model_are_those_of_one_device(name, unsharded):
    mesh, layout = LAYOUTS[name]
    assert md.Mesh.parse(mesh).size == 8
    np.testing.assert_allclose(
        losses(models.load("gpt_mini", SMALL), 10, mesh, layout), unsharded, atol=2e-5
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n == "sequence" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_on_tensorflow_they_are_the_same(name, unsharded):
    found = losses(models.load("gpt_mini", SMALL), 10, *LAYOUTS[name], backend="tf")
    np.testing.assert_allclose(found, unsharded, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEVEN)
def test_on_tensorflow_sizes_that_do_not_divide_change_nothing_either(name, odd_unsharded):
    found = losses(ODD, 10, *UNEVEN[name], backend="tf")
    np.testing.assert_allclose(found, odd_unsharded, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "rotary"])
def test_on_tensorflow_context_parallelism_changes_no_loss(name, unsharded):
    mesh, layout, changes, options = CONTEXT[name]
    model = models.load("gpt_mini", f"{SMALL},{changes}" if changes else SMALL)
    expected = losses(model, 10) if changes else unsharded
    found = losses(model, 10, mesh, layout, options, backend="tf")
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "rotary" else n for n in CONTEXT]
)
def test_context_parallelism_changes_no_loss(name, unsharded):
    mesh, layout, changes, options = CONTEXT[name]
    model = models.load("gpt_mini", f"{SMALL},{changes}" if changes else SMALL)
    expected = losses(model, 10) if changes else unsharded
    np.testing.assert_allclose(losses(model, 10, mesh, layout, options), expected, atol=2e-5)


ODD = replace(models.load("gpt_mini", "layers=2,embed=30,heads=5,d_ff=50,vocab=257"), length=30)


@pytest.fixture(scope="module")
def odd_unsharded():
    return losses(ODD, 10)


@pytest.mark.long
@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_do_not_divide_change_no_loss(name, odd_unsharded):
    np.testing.assert_allclose(losses(ODD, 10, *UNEVEN[name]), odd_unsharded, atol=2e-5)


@pytest.fixture(scope="module")
def gpt_mini_unsharded():
    return losses(models.load("gpt_mini"), 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_fifty_losses_of_gpt_mini_are_those_of_one_device(name, gpt_mini_unsharded):
    found = losses(models.load("gpt_mini"), 50, *LAYOUTS[name])
    np.testing.assert_allclose(found, gpt_mini_unsharded, atol=2e-5)
