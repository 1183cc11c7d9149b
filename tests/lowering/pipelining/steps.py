"""Training steps of small models, to be run as pipelines and without."""

import functools

import jax
import numpy as np

import meshdsl as md
from meshdsl import models
from meshdsl.lowering.options import Options
from meshdsl.optim import Sgd
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step

GPT = "gpt_mini", "layers=4,embed=16,heads=2,d_ff=32,vocab=32"
LLAMA = "llama_7b", "layers=4,embed=32,heads=4,kv=8,d_ff=64,vocab=32"
EXPERTS = "mixtral_mini", "layers=4,vocab=32"
DENSE_FIRST = "deepseek_mini", "layers=5,vocab=32"
KINDS = "deepseek_mini", "layers=7,dense_layers=3,vocab=32"
T5 = "t5_mini", "layers=4,vocab=32"


def layers(model, count):
    """Returns a model with another number of layers."""
    name, overrides = model
    return name, f"{overrides},layers={count}"


@functools.cache
def problem(model, microbatches, batch=None, length=8):
    """Returns the step of a model, its state and a batch, of two rows per microbatch or more."""
    batch = batch or max(8, 2 * microbatches)
    name, overrides = model
    rows = dict(row.split("=") for row in overrides.split(","))  # the last of a name counts
    loaded = models.load(name, ",".join(f"{k}={v}" for k, v in rows.items()))
    rng = np.random.default_rng(0)
    data = {
        key: md.named(rng.integers(0, 32, spec.dims.sizes).astype("int32"), spec.dims)
        for key, spec in loaded.batch_spec(batch, length).items()
    }
    optimizer = Sgd(0.1, momentum=0.9)  # its state is the gradient of the step
    step = make_train_step(
        loaded.loss, optimizer, microbatches=microbatches, clip_norm=1.0, update=loaded.update
    )
    init = create(loaded.init, optimizer)
    state = md.jit(init, backend="numpy")(md.random.key(0))
    return step, state, data, spec_of(init)


def run(model, microbatches, mesh=None, layout=None, backend="numpy", **options):
    """Returns what a step returns: the new state, and the metrics."""
    step, state, data, _ = problem(model, microbatches)
    return md.jit(step, mesh, layout, backend, options=Options(**options))(state, data)


@functools.cache
def alone(model, microbatches):
    """Returns what a step returns on one device."""
    return run(model, microbatches)


def lower(model, microbatches, mesh, layout, batch=None, **options):
    """Returns the program of a step."""
    step, _, data, spec = problem(model, microbatches, batch)
    jitted = md.jit(step, mesh, layout, donate="state", options=Options(**options))
    return jitted.lower(spec, data)


def leaves(tree):
    """Returns the arrays of a tree in float64, by their paths."""
    is_leaf = lambda value: isinstance(value, md.NamedArray)  # noqa: E731
    keyed = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {jax.tree_util.keystr(keys): np.asarray(leaf, "f8") for keys, leaf in keyed}


def check_close(found, expected, tolerance=1e-6):
    """Two trees have the same paths and numbers, relative to the largest of each tensor."""
    found, expected = leaves(found), leaves(expected)
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        scale = np.abs(values).max() + 1e-9
        assert np.abs(found[path] - values).max() <= tolerance * scale, path


def check_same(model, microbatches, *how, **options):
    """A step has the numbers of one device."""
    # Other axes and backends add up in another order: without a pipeline, it is as much.
    close = 1e-6 if how[1:] == ("layers:pipe",) else 5e-6
    check_close(run(model, microbatches, *how, **options), alone(model, microbatches), close)
