"""Published models: their names, and on four layouts the outputs and gradients of JAX.

The judge is JAX in float64. In float32 its own gradients of ResNet-50 are up to 6e-6 off these, as
ours are up to 8e-6: where a ReLU begins, rounding decides.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.imports.jax.listing import share
from tests.imports.jax.distances import distances
from tests.imports.jax.published import MODELS
from tests.imports.jax.test_function import MESH, is_named

KERAS = Path(__file__).with_name("keras_gpt2.py")


built = functools.cache(lambda name: MODELS[name]())


def in_double(tree):
    return jax.tree.map(lambda a: a.astype("float64") if a.dtype == np.float32 else a, tree)


@functools.cache
def of_jax(name):
    """Returns the loss of a model, its outputs and its gradients, in float64."""
    model = built(name)
    step = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    return step(*in_double((model.params, *model.inputs)))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_few_names_name_nearly_all_dims(name):
    model = built(name)
    inferred = md.from_jax(model.loss, model.names).inferred(model.params, *model.inputs)
    counted = share(inferred.naming, inferred.frame)
    assert counted.every > 500
    assert counted.known >= 0.95 * counted.every


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_jax(name, number):
    model, ((expected, outputs), slopes) = built(name), of_jax(name)
    program = md.from_jax(model.loss, model.names)
    step = md.value_and_grad(program, has_aux=True)
    run = md.jit(step, MESH, model.layouts[number], backend="numpy")
    given = model.params, *model.inputs
    for arguments, within in ((given, 1e-5), (in_double(given), 1e-10)):
        (found, ours), gradients = run(*program.named(*arguments))
        assert max(distances([found, ours], [expected, outputs])) <= within
        leaves = jax.tree.leaves(gradients, is_leaf=is_named)
        assert max(distances(leaves, jax.tree.leaves(slopes))) <= within


@pytest.mark.long
@pytest.mark.slow
def test_gpt2_of_keras_hub():
    """Keras chooses its backend when it is imported: the model has a process of its own."""
    pytest.importorskip("keras_hub")
    command = [sys.executable, "-W", "ignore", str(KERAS)]
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dims"] > 500 and found["named"] >= 0.95 * found["dims"]
    assert len(found["layouts"]) == 4
    for layout, errors in found["layouts"].items():
        assert max(errors) <= 1e-5, layout
