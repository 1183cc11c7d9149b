"""Random training steps: parameters that live between steps, a loss, its gradient, an update.

The parameters of the blocks are stacked, and a scan over `layers` runs them, so a storage layout is
undone and done inside of a loop; microbatches put another loop around it. What comes in as
`inputs/state/...` goes out as `state/...`, elementwise of itself and of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.optim import global_norm
from meshdsl.tensors.dtypes import as_dtype
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.microbatches import accumulated
from tests.property.author import VOLUME, Author, some_dims, together
from tests.property.operations import step

SCOPES = [
    "params",
    "optimizer",
    "gradients",
    "state",
    "blocks",
    "params/blocks",
    "optimizer/params/blocks",
    "gradients/params/blocks",
    "state/params",
    "**/u",
    "params/w*",
]


def program(
    number: int,
    rng: np.random.Generator,
    sizes: dict[str, int],
    differentiable: bool,
    dtype: str = "float64",
    pipeline: bool = False,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a function of `{"state": ..., "batch": ...}`, and what to give it.

    Args:
        dtype: that of the computation. If it is of half precision, parameters mostly are float32.
        pipeline: whether it shall have what a pipeline needs: several layers and microbatches.
    """
    rows = md.Dimension("rows", int(rng.choice([2, 3, 4, 6, 8, 12])))
    layers = md.Dimension("layers", int(rng.integers(2 if pipeline else 1, 6 if pipeline else 5)))
    policy = _policy(rng, dtype)
    state, batch = _state(rng, sizes, layers, policy.params), _batch(rng, sizes, rows, dtype)
    counts = [n for n in (1, 1, 2, 3, 4) if rows.size % n == 0 and (n > 1 or not pipeline)]
    microbatches = int(rng.choice(counts))
    clips, remat = bool(rng.random() < 0.3), str(rng.choice(["none", "full", "collectives"]))
    if remat == "full" and number % 2:
        remat = "products"

    def function(inputs: dict[str, Any]) -> Any:
        drawn = np.random.default_rng([number, 2])

        def loss(params: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, dict]:
            author = Author(drawn, sizes, differentiable, dtype=dtype)
            value, metrics = _loss(author, policy.to_compute(params), batch, remat)
            return md.cast(value, policy.output), metrics

        state, batch = inputs["state"], inputs["batch"]
        if microbatches > 1:
            differentiated = accumulated(loss, microbatches, "rows")
        else:
            differentiated = md.value_and_grad(loss, has_aux=True)
        (value, metrics), grads = differentiated(state["params"], batch)
        norm = global_norm(grads)
        if clips:
            grads = jax.tree.map(lambda g: g / (1.0 + md.cast(norm, g.dtype)), grads)
        return {"state": _updated(state, grads), "loss": value, "norm": norm, "metrics": metrics}

    return function, {"state": state, "batch": batch}


def _policy(rng: np.random.Generator, dtype: str) -> md.Policy:
    """Returns a policy that computes in a dtype, of parameters in that or, mostly, in float32."""
    if dtype == "float64":
        return md.Policy(dtype, dtype, dtype)
    apart = rng.spawn(1)[0]
    params, output = (str(apart.choice(["float32", "float32", dtype])) for _ in range(2))
    return md.Policy(params, dtype, output)


def _state(
    rng: np.random.Generator, sizes: dict[str, int], layers: md.Dimension, dtype: np.dtype
) -> dict[str, Any]:
    def array(dims: list[md.Dimension]) -> md.NamedArray:
        return md.named(rng.uniform(-1, 1, [d.size for d in dims]).astype(dtype), dims)

    def dims() -> list[md.Dimension]:
        while True:
            found = some_dims(rng, sizes, low=1, high=2)
            if layers.size * md.Shape(found).volume <= 128:
                return found

    shapes = {
        "w_in": dims(),
        "w_out": dims(),
        "blocks": {"u": [layers, *dims()], "v": [layers, *dims()], "scale": [layers]},
    }

    def is_dims(shape: Any) -> bool:
        return isinstance(shape, list)

    params = jax.tree.map(array, shapes, is_leaf=is_dims)
    moments = jax.tree.map(array, shapes, is_leaf=is_dims)
    return {"params": params, "optimizer": {"params": moments}, "step": md.named(np.int32(3), [])}


def _batch(
    rng: np.random.Generator, sizes: dict[str, int], rows: md.Dimension, dtype: str
) -> dict[str, md.NamedArray]:
    def array(dims: list[md.Dimension]) -> md.NamedArray:
        return md.named(rng.uniform(-1, 1, [d.size for d in dims]).astype(as_dtype(dtype)), dims)

    while True:
        x, target = ([rows, *some_dims(rng, sizes, low=0, high=1)] for _ in range(2))
        if max(md.Shape(x).volume, md.Shape(target).volume) <= 96:
            break
    tokens = rng.integers(-1, 8, [rows.size]).astype(np.int32)
    return {
        "x": array(x),
        "target": array(target),
        "tokens": md.named(tokens, [rows]),
    }


def _loss(
    author: Author, params: dict[str, Any], batch: dict[str, Tensor], remat: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Draws a loss: some operations, a scan over the blocks, and more operations."""
    for name, tensor in batch.items():
        author.keep(tensor, 40.0 if name == "tokens" else 1.0)
    author.keep(params["w_in"])
    x = _product(author, batch["x"], params["w_in"])
    author.keep(x)
    for _ in range(author.rng.integers(0, 3)):
        step(author)

    def block(x: Tensor, held: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        inner = author.inside()
        y = _product(author, x, held["u"])
        inner.keep(y)
        inner.keep(held["v"])
        for _ in range(author.rng.integers(0, 4)):
            step(inner)
        y = _product(author, inner.fit(inner.one(inner.live), x.shape), held["v"])
        new = md.tanh(x + held["scale"] * inner.fit(y, x.shape) + _smooth(held, author.dtype))
        return new, md.mean(new) if author.rng.random() < 0.5 else None

    run = block
    if remat != "none":
        run = md.checkpoint(block, collectives=remat == "collectives", products=remat == "products")
    x, means = md.scan(run, x, params["blocks"], "layers")
    author.keep(x)
    for _ in range(author.rng.integers(0, 3)):
        step(author)
    author.keep(_product(author, x, params["w_out"]))
    total = author.loss() + md.mean(md.square(batch["target"] - md.mean(x)))
    total = total + _smooth({name: params[name] for name in ("w_in", "w_out")}, author.dtype)
    return total, {"last": md.mean(x)} | ({} if means is None else {"blocks": md.mean(means)})


def _smooth(params: dict[str, Tensor], dtype: np.dtype) -> Tensor:
    """Returns something by which every parameter reaches the loss, whatever else reads it."""
    return sum((0.01 * md.mean(md.sin(p)) for p in params.values()), md.zeros([], dtype))


def _product(author: Author, x: Tensor, w: Tensor) -> Tensor:
    """Returns a tame product of two tensors, over some of the dims that they share."""
    dims = together([x, w])
    shared = [name for name in x.shape.names if w.shape.find(name) is not None]
    over = author.subset(shared) if dims.volume <= VOLUME else list(shared)
    if dims.without(over).volume > VOLUME:
        w = md.mean(w, [name for name in w.shape.names if name not in shared])
        dims = together([x, w])
    return md.tanh(md.einsum(x, w, over=over))


def _updated(state: dict[str, Any], grads: Any) -> dict[str, Any]:
    """Returns the state after a step of gradient descent with momentum."""
    moments = jax.tree.map(
        lambda m, g: 0.9 * m + md.cast(g, m.dtype), state["optimizer"]["params"], grads
    )
    dtype = state["params"]["w_in"].dtype
    rate = 0.1 / (1.0 + md.cast(state["step"], dtype))
    params = jax.tree.map(
        lambda p, m: p - rate * (m / (1.0 + md.abs(m)) + 0.01 * p), state["params"], moments
    )
    return {"params": params, "optimizer": {"params": moments}, "step": state["step"] + 1}
