"""Averages of parameters, against a loop of numpy in float64 over the optimizer's own steps."""

import jax
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.optim import AdamW, Ema, Sgd
from meshdsl.tensors import dtypes
from meshdsl.training.recipe import Recipe
from meshdsl.training.state import spec_of
from tests.optim import trees


def averages(optimizer, decay, steps, dtype="float32"):
    """Returns the averages of the parameters that an optimizer has after each step."""
    mean = jax.tree.map(lambda a: a.astype(np.float64), trees.arrays(trees.tree(0, dtype)))
    for t in range(steps):
        params, _ = trees.run(optimizer, t + 1, dtype=dtype)
        d = min(decay, (1 + t) / (10 + t))
        mean = jax.tree.map(
            lambda m, p, d=d: d * m + (1 - d) * p.astype(np.float64), mean, trees.arrays(params)
        )
    return mean


@pytest.mark.long
@pytest.mark.parametrize("decay", [0.999, 0.15])
@pytest.mark.parametrize("inner", [AdamW(0.05), optax.adam(0.05)], ids=["ours", "of optax"])
def test_averages_are_those_of_a_loop_and_parameters_those_of_the_optimizer(inner, decay):
    found, state = trees.run(Ema(inner, decay), 4)
    alone, own = trees.run(md.optim.as_optimizer(inner), 4)
    trees.assert_close(found, trees.arrays(alone), 0)
    trees.assert_close(state.inner, trees.arrays(own), 0)
    trees.assert_close(state.ema.params, averages(md.optim.as_optimizer(inner), decay, 4), 1e-6)


def test_sharded_values_are_the_unsharded_ones_and_nothing_moves():
    optimizer = Ema(Sgd(0.05), 0.9)
    found, state = trees.run(optimizer, 3, *trees.SHARDED)
    expected, unsharded = trees.run(optimizer, 3)
    trees.assert_close(found, trees.arrays(expected), 1e-6)
    trees.assert_close(state.ema.params, trees.arrays(unsharded.ema.params), 1e-6)
    assert trees.collectives(optimizer.update, trees.tree(0), state, trees.tree(0), 0) == []


@pytest.mark.parametrize(
    "layout",
    [
        "batch:data; heads:model",
        "batch:data; heads:model; optimizer/embed:data",
        "batch:data; params/embed:data",
    ],
)
def test_a_training_step_sends_the_same_with_averages(layout):
    """They lie like the optimizer's state, and so does the update that they read."""
    model = models.load("gpt_mini", "layers=2,embed=16,heads=4,d_ff=16")
    sent, places = [], {}
    for optimizer in (AdamW(1e-3), Ema(AdamW(1e-3))):
        recipe = Recipe(model.init, model.loss, optimizer)
        step = md.jit(recipe.train_step(), "data:2,model:2", layout, "numpy")
        program = step.lower(spec_of(recipe.create_state()), dict(model.batch_spec(8, 16)))
        sent.append(sorted((c.kind, c.axes, c.payload_bytes) for c in program.collectives))
        places |= {
            path: value.layout
            for path, value in zip(program.input_paths, program.block.inputs, strict=True)
        }
    assert sent[0] == sent[1] != []
    means = {path: own for path, own in places.items() if "/inner/mean/" in path}
    assert len(means) > 5
    for path, own in means.items():
        assert places[path.replace("/inner/mean/", "/ema/")] == own


def test_narrow_parameters_have_wide_averages():
    _, state = trees.run(Ema(Sgd(0.01)), 2, dtype=dtypes.BFLOAT16)
    assert state.ema.params["scale"].dtype == np.float32
    wanted = averages(Sgd(0.01), 0.999, 2, dtypes.BFLOAT16)
    trees.assert_close(state.ema.params, wanted, 1e-6)


def test_a_decay_out_of_range_is_told():
    with pytest.raises(ValueError, match=r"Ema: decay must be in \[0, 1\), got 1"):
        Ema(Sgd(0.01), 1)
