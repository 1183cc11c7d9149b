"""BERT, split over heads, the MLP and the vocabulary: tensor parallelism with plain batches.

The masks are random, but a function of the tokens: threefry's bits of a key that all tokens make.
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

from tests.benchmarks.baselines.parts import (
    Array,
    Size,
    adamw,
    attend,
    cast,
    compute_dtype,
    constrain,
    cross_entropy,
    layer_norm,
    stacked,
    training,
)

MASK, CHOSEN = 103, 0.15


@dataclass(frozen=True)
class Encoder:
    """Sizes; `positions` are those of the table, and the length of a batch."""

    layers: int
    embed: int
    heads: int
    vocab: int
    positions: int
    batch: int


def sized(size: Size) -> Encoder:
    """Returns the sizes."""
    if size == "tpu":
        return Encoder(4, 2048, 16, 32768, 512, 256)
    return Encoder(2, 256, 8, 512, 128, 16)


def layer_weights(embed: int, heads: int, fsdp: str | None = None) -> dict[str, Any]:
    """Returns the weights of a layer with biases; `fsdp` is the axis that splits embed."""
    bias = Array((embed,), P(fsdp))
    of_heads = Array((heads, embed // heads), P("model"))
    into = Array((embed, heads, embed // heads), P(fsdp, "model"))
    norm = {"scale": bias, "bias": bias}
    return {
        "attention_norm": norm,
        "attention": {
            "query": into,
            "key": into,
            "value": into,
            "out": Array((heads, embed // heads, embed), P("model", None, fsdp)),
            "query_bias": of_heads,
            "key_bias": of_heads,
            "value_bias": of_heads,
            "out_bias": bias,
        },
        "mlp_norm": norm,
        "mlp": {
            "w_in": Array((embed, 4 * embed), P(fsdp, "model")),
            "bias_in": Array((4 * embed,), P("model")),
            "w_out": Array((4 * embed, embed), P("model", fsdp)),
            "bias_out": bias,
        },
    }


def weights(c: Encoder) -> dict[str, Any]:
    """Returns all weights; the pooler and the segments are BERT's, and have little to do here."""
    bias = Array((c.embed,), P())
    norm = {"scale": bias, "bias": bias}
    square = Array((c.embed, c.embed), P())
    return {
        "embedding": Array((c.vocab, c.embed), P("model")),
        "positions": Array((c.positions, c.embed), P()),
        "segments": Array((2, c.embed), P()),
        "embedding_norm": norm,
        "blocks": stacked(c.layers, layer_weights(c.embed, c.heads)),
        "pooler": {"weight": square, "bias": bias},
        "head": {
            "weight": square,
            "bias": bias,
            "norm": norm,
            "out_bias": Array((c.vocab,), P("model")),
        },
    }


def corrupted(c: Encoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tokens of which some are masked or exchanged, and where the loss is about them."""
    place = jnp.arange(c.positions, dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(1)
    total = jnp.sum(tokens.astype(jnp.uint32) * place, dtype=jnp.uint32)
    key = jax.random.wrap_key_data(jnp.stack([total, total]), impl="threefry2x32")

    def uniform(key: jax.Array) -> jax.Array:
        bits = jax.random.bits(key, tokens.shape, jnp.uint32)
        return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)

    where, how, what = jax.random.split(key, 3)
    chosen, share = uniform(where) < CHOSEN, uniform(how)
    other = (uniform(what) * c.vocab).astype(tokens.dtype)
    put = jnp.where(share < 0.8, MASK, jnp.where(share < 0.9, other, tokens))
    return jnp.where(chosen, put, tokens).astype(tokens.dtype), chosen


def attention_layer(
    mesh: Mesh,
    kernels: bool,
    x: jax.Array,
    w: Mapping[str, Any],
    stream: str | None = None,
    causal: bool = False,
) -> jax.Array:
    """Returns what attention adds to the stream, whose positions the axis `stream` splits."""
    spec = P("data", None, "model")

    if stream is None:
        # One product makes all three: XLA would sum their gradients by x one by one. Where these
        # are reduce-scattered to a split stream, it adds them up first.
        weight = jnp.stack([w["query"], w["key"], w["value"]])
        bias = jnp.stack([w["query_bias"], w["key_bias"], w["value_bias"]])
        three = jnp.einsum("ble,cehk->cblhk", x, weight) + bias[:, None, None]
    else:
        names = ("query", "key", "value")
        three = [jnp.einsum("ble,ehk->blhk", x, w[name]) + w[f"{name}_bias"] for name in names]
    q, k, v = (constrain(one, mesh, *spec) for one in three)
    mixed = attend(mesh, spec, q[:, :, :, None], k, v, causal, kernels)[:, :, :, 0]
    y = jnp.einsum("blhk,hke->ble", constrain(mixed, mesh, *spec), w["out"])
    return constrain(y, mesh, "data", stream) + w["out_bias"]


def mlp_layer(
    mesh: Mesh, x: jax.Array, w: Mapping[str, Any], stream: str | None = None
) -> jax.Array:
    """Returns what the MLP adds to the stream; arguments as in `attention_layer`."""
    h = constrain(x @ w["w_in"] + w["bias_in"], mesh, "data", None, "model")
    return constrain(jax.nn.gelu(h) @ w["w_out"], mesh, "data", stream) + w["bias_out"]


def loss(
    c: Encoder, mesh: Mesh, kernels: bool, dtype: Any, params: Any, batch: Mapping[str, Any]
) -> jax.Array:
    """Returns the mean negative log-likelihood of the chosen tokens."""
    tokens = batch["tokens"]
    given, chosen = corrupted(c, tokens)

    def normed(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        return layer_norm(x, w["scale"], w["bias"])

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = cast(w, dtype)
        x = normed(x + attention_layer(mesh, kernels, x, w["attention"]), w["attention_norm"])
        return normed(x + mlp_layer(mesh, x, w["mlp"]), w["mlp_norm"]), None

    table = params["embedding"].astype(dtype)
    x = constrain(jnp.take(table, given, axis=0), mesh, "data")
    x = x + (params["positions"] + params["segments"][0]).astype(dtype)
    x = normed(x, cast(params["embedding_norm"], dtype))
    x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params["blocks"])
    head = cast(params["head"], dtype)
    x = normed(jax.nn.gelu(x @ head["weight"] + head["bias"]), head["norm"])
    logits = jnp.einsum("ble,ve->blv", x, table) + head["out_bias"]
    each = cross_entropy(constrain(logits, mesh, "data", None, "model"), tokens)
    return jnp.sum(jnp.where(chosen, each, 0)) / jnp.maximum(jnp.sum(chosen), 1)


def encoder_tensor(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axes data and model."""
    c = sized(size)
    loss_of = partial(loss, c, mesh, kernels, compute_dtype(size))
    one = Array((c.batch, c.positions), P("data"), jnp.int32)
    batch = {"tokens": one, "targets": one}
    return training(mesh, loss_of, weights(c), batch, adamw(apart="pooler"))  # it is not trained
