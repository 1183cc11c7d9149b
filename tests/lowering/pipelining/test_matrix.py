"""Every model, schedule, number of stages and of rounds has the numbers of one device.

In float64 they are the same, rounding aside. In float32 gradients are within 1e-6. Through 16
layers or more they may be further away, but then as close to those of float64 as the gradients of
two devices that split the batch.
"""

import functools

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from tests.lowering.pipelining.steps import layers, leaves, problem

MODELS = {
    "gpt": ("gpt_mini", "embed=8,heads=2,d_ff=16,vocab=32"),
    "llama": ("llama_7b", "embed=16,heads=2,kv=8,d_ff=32,vocab=32"),
    "mixtral": ("mixtral_mini", "embed=16,heads=2,d_ff=16,vocab=32"),
    "t5": ("t5_mini", "embed=16,heads=2,kv=8,d_ff=32,vocab=32"),
    "uneven": ("gpt_mini", "embed=8,heads=2,d_ff=16,vocab=32"),
}
MICROBATCHES = {2: 5, 4: 6, 8: 9}  # by the number of stages, which does not divide them
SCHEDULES = {
    1: ("circular", "gpipe", "1f1b", "zb-h1"),
    2: ("circular", "interleaved", "zbv"),
    4: ("circular", "interleaved"),
}
LOSS = ".metrics['loss']"


def model_of(name, stages, rounds):
    """Returns a model with a layer per chunk; `uneven` has more, so the last chunks have fewer."""
    count = stages * rounds
    more = max(1, count // 4) if name == "uneven" else 0
    return layers(MODELS[name], count + more)


def stepped(model, microbatches, *how, wide=False, **options):
    """Returns what a step returns, by paths; in float64 if it is `wide`."""
    name, overrides = model
    step, _, data, _ = problem(
        (name, f"{overrides},policy=float64") if wide else model, microbatches
    )
    state = problem(model, microbatches)[1]
    how = how or (None, None)
    jitted = md.jit(step, *how, "numpy", options=Options(**options))
    return leaves(jitted(in_float64(state) if wide else state, data))


alone = functools.cache(stepped)


def in_float64(tree):
    """Returns a tree with its floats in float64."""

    def widened(x):
        data = np.asarray(x)
        return md.named(data.astype("f8") if data.dtype.kind == "f" else data, x.dims)

    return jax.tree.map(widened, tree, is_leaf=lambda x: isinstance(x, md.NamedArray))


def error(found, expected):
    """Returns the largest error of parameters and gradients, relative to each tensor's largest."""
    assert found.keys() == expected.keys()
    return max(
        np.abs(found[path] - values).max() / (np.abs(values).max() + 1e-9)
        for path, values in expected.items()
        if path.startswith(".state")
    )


def check(name, stages, rounds, schedule):
    model, microbatches = model_of(name, stages, rounds), MICROBATCHES[stages]
    how = (model, microbatches, f"pipe:{stages}", "layers:pipe")
    options = {"pipeline": schedule, "pipeline_rounds": rounds}
    exact = alone(model, microbatches, wide=True)
    assert error(stepped(*how, wide=True, **options), exact) < 1e-10
    found, expected = stepped(*how, **options), alone(model, microbatches)
    assert found[LOSS] == pytest.approx(expected[LOSS], rel=2e-5)
    if error(found, expected) > 1e-6:
        halves = error(alone(model, microbatches, "data:2", "batch:data"), exact)
        assert stages * rounds >= 16 and error(found, exact) < 1.5 * halves


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stages", "rounds", "schedule"),
    [
        ("gpt", 2, 2, "interleaved"),
        ("llama", 4, 2, "circular"),
        ("mixtral", 2, 2, "circular"),
        ("t5", 4, 1, "1f1b"),
        ("uneven", 8, 1, "gpipe"),
        ("uneven", 4, 2, "circular"),
        ("uneven", 4, 2, "zbv"),
        ("t5", 2, 2, "zbv"),
    ],
)
def test_a_schedule_has_the_numbers_of_one_device(name, stages, rounds, schedule):
    check(name, stages, rounds, schedule)


TENSOR = "layers:pipe; batch:data; heads:model; d_ff:model; vocab:model+pipe; length:model?"
STORED = "layers:pipe; batch:data; params/embed:data; optimizer/embed:data; vocab:pipe"
EXPERTS = "layers:pipe; batch:data; experts:expert"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "layout", "rounds", "schedule"),
    [
        ("gpt", "pipe:2,data:2,model:2", TENSOR, 1, "circular"),
        ("llama", "pipe:2,data:2,model:2", TENSOR, 2, "circular"),
        ("uneven", "pipe:2,data:2", STORED, 2, "zbv"),
        ("mixtral", "pipe:2,data:2,expert:2", EXPERTS, 1, "circular"),
        ("t5", "pipe:2,data:2,model:2", TENSOR, 2, "circular"),
    ],
)
def test_with_other_axes_beside_it_too(name, mesh, layout, rounds, schedule):
    model = model_of(name, 2, rounds)
    options = {"pipeline": schedule, "pipeline_rounds": rounds}
    found = stepped(model, 5, mesh, layout, wide=True, **options)
    assert error(found, alone(model, 5, wide=True)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", MICROBATCHES)
def test_every_schedule_has_the_numbers_of_one_device(name, stages):
    for rounds, schedules in SCHEDULES.items():
        for schedule in schedules:
            check(name, stages, rounds, schedule)
