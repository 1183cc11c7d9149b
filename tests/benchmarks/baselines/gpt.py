"""GPT-2 on one device: learned positions, layer norms, biases, plain attention."""

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
    adamw,
    cast,
    cross_entropy,
    layer_norm,
    stacked,
    training,
)


@dataclass(frozen=True)
class Gpt:
    """Sizes; `length` is that of a batch, and counts the positions of the table."""

    layers: int
    embed: int
    heads: int
    vocab: int
    length: int
    batch: int


def weights(c: Gpt) -> dict[str, Any]:
    """Returns all weights."""
    bias = Array((c.embed,), P())
    return {
        "embedding": Array((c.vocab, c.embed), P("model")),
        "positions": Array((c.length, c.embed), P()),
        "blocks": stacked(c.layers, layer_weights(c.embed, c.heads)),
        "final_norm": {"scale": bias, "bias": bias},
    }


def loss(
    c: Gpt, mesh: Mesh, kernels: bool, dtype: Any, params: Any, batch: Mapping[str, Any]
) -> jax.Array:
    """Returns the mean negative log-likelihood of the targets; layers are scanned."""

    def normed(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        return layer_norm(x, w["scale"], w["bias"])

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = cast(w, dtype)
        h = normed(x, w["attention_norm"])
        x = x + attention_layer(mesh, kernels, h, w["attention"], causal=True)
        return x + mlp_layer(mesh, normed(x, w["mlp_norm"]), w["mlp"]), None

    table = params["embedding"].astype(dtype)
    x = jnp.take(table, batch["tokens"], axis=0) + params["positions"].astype(dtype)
    x, _ = lax.scan(layer, x, params["blocks"])
    x = normed(x, cast(params["final_norm"], dtype))
    logits = jnp.einsum("ble,ve->blv", x, table)
    return jnp.mean(cross_entropy(logits, batch["targets"]))


def program(mesh: Mesh, c: Gpt, dtype: Any, kernels: bool = True) -> tuple[Any, Any, Any]:
    """Returns the training step, the state and the batch."""
    one = Array((c.batch, c.length), P("data"), jnp.int32)
    batch = {"tokens": one, "targets": one}
    return training(mesh, partial(loss, c, mesh, kernels, dtype), weights(c), batch, adamw())
