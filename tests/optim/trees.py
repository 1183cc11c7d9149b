"""A small tree of parameters, and optimizers run on it: ours, and one of optax's."""

import jax
import numpy as np
import optax

import meshdsl as md

layers, embed, heads, d_ff = md.dims(layers=3, embed=8, heads=4, d_ff=16)
DIMS = {
    "blocks": {"query": [layers, embed, heads], "bias": [layers, d_ff], "w_in": [embed, d_ff]},
    "scale": [embed],
}
SHARDED = ("data:2,model:4", "embed:data; heads:model; d_ff:model")
DECAYS = {"blocks": {"query": True, "bias": False, "w_in": True}, "scale": False}


def is_dims(node):
    return isinstance(node, list)


def tree(seed, dtype="float32"):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda dims: md.named(rng.standard_normal([d.size for d in dims]).astype(dtype), dims),
        DIMS,
        is_leaf=is_dims,
    )


def arrays(named):
    return jax.tree.map(
        lambda a: np.asarray(a), named, is_leaf=lambda x: isinstance(x, md.NamedArray)
    )


def run(optimizer, steps, mesh=None, layout=None, dtype="float32", backend="jax"):
    """Returns the parameters and the optimizer's state after some steps, gradients at random."""
    step = md.jit(optimizer.update, mesh, layout, backend)
    params = tree(0, dtype)
    state = md.jit(optimizer.init, mesh, layout, backend)(params)
    for number in range(steps):
        params, state = step(tree(1 + number, dtype), state, params, number)
    return params, state


def run_optax(transformation, steps, dtype="float32"):
    params = arrays(tree(0, dtype))
    state = transformation.init(params)
    for number in range(steps):
        updates, state = transformation.update(arrays(tree(1 + number, dtype)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(found, expected, tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        arrays(found),
        arrays(expected),
    )


def collectives(function, *arguments):
    """Returns kind, axes and bytes of the collectives of a function on the sharded mesh."""
    program = md.jit(function, *SHARDED).lower(*arguments)
    return [(c.kind, set(c.axes), c.payload_bytes) for c in program.collectives]
