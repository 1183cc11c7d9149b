"""A vision transformer: patches of images, FSDP with tensor and sequence parallelism.

Dosovitskiy et al. 2021, "An image is worth 16x16 words"; the widths are those of Dehghani et al.
2023, "Scaling vision transformers to 22 billion parameters", table 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.benchmarks.baselines.encoder import attention_layer, layer_weights, mlp_layer
from tests.benchmarks.baselines.parts import (
    Array,
    Size,
    adamw,
    cast,
    compute_dtype,
    constrain,
    cross_entropy,
    layer_norm,
    stacked,
    training,
)

COLORS = 3


@dataclass(frozen=True)
class Vision:
    """Sizes; an image has `rows * rows` patches of `patch * patch` pixels."""

    layers: int
    embed: int
    heads: int
    patch: int
    rows: int
    classes: int
    batch: int


def sized(size: Size) -> Vision:
    """Returns the sizes."""
    if size == "tpu":
        return Vision(4, 6144, 48, 14, 16, 1024, 1024)
    return Vision(2, 128, 8, 4, 4, 32, 16)


def weights(c: Vision) -> dict[str, Any]:
    """Returns all weights."""
    bias = Array((c.embed,), P("data"))
    norm = {"scale": bias, "bias": bias}
    return {
        "patches": Array((c.patch, c.patch, COLORS, c.embed), P(None, None, None, "data")),
        "patch_bias": bias,
        "positions": Array((c.rows**2, c.embed), P(None, "data")),
        "blocks": stacked(c.layers, layer_weights(c.embed, c.heads, "data")),
        "final_norm": norm,
        "head": Array((c.embed, c.classes), P("data")),
        "head_bias": Array((c.classes,), P()),
    }


def loss(
    c: Vision, mesh: Mesh, kernels: bool, dtype: Any, params: Any, batch: Mapping[str, Any]
) -> jax.Array:
    """Returns the mean negative log-likelihood of the labels."""

    def gathered(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        return constrain(layer_norm(x, w["scale"], w["bias"]), mesh, "data")

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = cast(w, dtype)
        h = gathered(x, w["attention_norm"])
        x = x + attention_layer(mesh, kernels, h, w["attention"], "model")
        return x + mlp_layer(mesh, gathered(x, w["mlp_norm"]), w["mlp"], "model"), None

    outer = cast({n: w for n, w in params.items() if n != "blocks"}, dtype)
    image = batch["image"].astype(dtype)
    x = image.reshape(c.batch, c.rows, c.patch, c.rows, c.patch, COLORS)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(c.batch, c.rows**2, -1)
    x = constrain(x, mesh, "data", "model")
    x = x @ outer["patches"].reshape(-1, c.embed) + outer["patch_bias"] + outer["positions"]
    x = constrain(x, mesh, "data", "model")
    x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params["blocks"])
    norm = outer["final_norm"]
    x = jnp.mean(layer_norm(x, norm["scale"], norm["bias"]), axis=1)
    logits = constrain(x, mesh, "data") @ outer["head"] + outer["head_bias"]
    return jnp.mean(cross_entropy(logits, batch["label"]))


def vision(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axes data and model."""
    c = sized(size)
    loss_of = partial(loss, c, mesh, kernels, compute_dtype(size))
    side = c.rows * c.patch
    batch = {
        "image": Array((c.batch, side, side, COLORS), P("data")),
        "label": Array((c.batch,), P("data"), jnp.int32),
    }
    return training(mesh, loss_of, weights(c), batch, adamw())
