"""Runs a model with the weights of KerasHub's, and compares what comes out of both."""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import meshdsl as md
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import Spec
from meshdsl.training.state import spec_of

REFERENCE = Path(__file__).with_name("reference.py")
TOLERANCE = 1e-4


@functools.cache
def reference(name):
    """Returns what KerasHub's model has and finds, in groups of arrays by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.npz"
        command = [sys.executable, "-W", "ignore", str(REFERENCE), name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        groups = {}
        with np.load(file) as arrays:
            for key, value in arrays.items():
                group, _, rest = key.partition("/")
                groups.setdefault(group, {})[rest] = value
    return groups


def stacked(pattern, layers=2):
    """Returns the weights of all layers, along one more axis in front."""
    return lambda weights: np.stack([weights[pattern.format(i)] for i in range(layers)])


def single(name):
    return lambda weights: weights[name]


def check(name, init, states, mapping, inputs, outputs, **where):
    """Outputs and the gradients of all parameters are those of KerasHub's model.

    Args:
        init: as a model's.
        states: from parameters and inputs to outputs by KerasHub's names.
        mapping: for the path of each parameter, a function that finds it among KerasHub's weights,
            or its gradient among their gradients; None: KerasHub's model does without it.
        inputs: the inputs, from KerasHub's by name.
        outputs: the dims of each output.
        where: the mesh and the layout, as for `md.jit`.
    """
    found = reference(name)
    params = parameters(init, found["weight"], mapping)
    given = inputs(found["input"])
    cotangents = {key: md.named(found["cotangent"][key], dims) for key, dims in outputs.items()}

    def total(params, given, cotangents):
        results = states(params, given)
        return sum(md.sum(results[key] * one) for key, one in cotangents.items()), results

    step = md.jit(md.value_and_grad(total, has_aux=True), **where)
    (_, results), gradients = step(params, given, cotangents)
    for key, dims in outputs.items():
        order = [results[key].dims.names.index(dim) for dim in dims]
        array = np.asarray(results[key]).transpose(order)
        assert_near(array, found["output"][key], key)
    for path, gradient in by_path(gradients).items():
        if mapping[path] is not None:
            wanted = mapping[path](found["gradient"])
            assert_near(gradient, np.reshape(wanted, gradient.dims.sizes), path)


def parameters(init, weights, mapping):
    """Returns the parameters that `init` would make, with KerasHub's weights in them."""
    specs = spec_of(init)
    paths = by_path(specs)
    assert paths.keys() == mapping.keys(), sorted(paths.keys() ^ mapping.keys())
    leaves = []
    for path, spec in paths.items():
        take = mapping[path]
        value = np.ones(spec.dims.sizes) if take is None else take(weights)
        leaves.append(md.named(np.reshape(value, spec.dims.sizes).astype("float32"), spec.dims))
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_named), leaves)


def is_named(x):
    return isinstance(x, md.NamedArray | Spec)


def by_path(tree):
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    return {path_of(keys): leaf for keys, leaf in keyed}


def assert_near(found, wanted, name):
    """Compares with a tolerance relative to the largest element, or to 0.1 if that is larger.

    Some gradients are zero but for rounding: a softmax does not see the biases of its keys.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    scale = max(np.abs(wanted).max(), 0.1)
    error = np.abs(found - wanted).max() / scale
    assert error <= TOLERANCE, f"{name} is off by {error:.2g} of its scale {scale:.2g}"
