"""Decoders: FSDP with tensor and sequence parallelism, grouped queries, long contexts.

With sequence parallelism the residual stream is split along its positions over the axes that split
heads and the MLP. It is gathered before the products and reduce-scattered after them (Korthikanti
et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.benchmarks.baselines.parts import (
    Array,
    Axes,
    Size,
    adamw,
    attend,
    attention,
    cast,
    compute_dtype,
    constrain,
    cross_entropy,
    has_kernel,
    rms_norm,
    rotary,
    splash,
    stacked,
    training,
)


@dataclass(frozen=True)
class Decoder:
    """Sizes, and where things are.

    Attributes:
        kv_heads: heads of keys and values, each for a group of `heads / kv_heads` queries.
        stream: the axes of the positions of the residual stream.
        context: the axis of the positions in attention and in the MLP.
        keys, queries: the axes of the heads of keys, and of the queries in their groups.
        hidden: the axes of the MLP and of the vocabulary.
        fsdp: the axes over which weights are stored split.
        remat: whether the backward pass computes layers again.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    d_ff: int
    vocab: int
    batch: int
    length: int
    gated: bool = False
    tied: bool = True
    remat: bool = True
    data: Axes = "data"
    stream: Axes = "model"
    context: str | None = None
    keys: Axes = "model"
    queries: Axes = None
    hidden: Axes = "model"
    fsdp: Axes = "data"

    @property
    def kv(self) -> int:
        return self.embed // self.heads

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def attention_weights(c: Decoder) -> dict[str, Array]:
    """Returns the weights of attention in one layer."""
    group, queries = ((), ()) if c.group == 1 else ((c.group,), (c.queries,))
    return {
        "query": Array((c.embed, c.kv_heads, *group, c.kv), P(c.fsdp, c.keys, *queries)),
        "key": Array((c.embed, c.kv_heads, c.kv), P(c.fsdp, c.keys)),
        "value": Array((c.embed, c.kv_heads, c.kv), P(c.fsdp, c.keys)),
        "out": Array((c.kv_heads, *group, c.kv, c.embed), P(c.keys, *queries, None, c.fsdp)),
    }


def weights(c: Decoder, mlp: Any = None) -> dict[str, Any]:
    """Returns all weights; `mlp` are those of a layer's feed-forward part, if it is another."""
    scale = Array((c.embed,), P(c.fsdp))
    into = Array((c.embed, c.d_ff), P(c.fsdp, c.hidden))
    dense = {"w_in": into, "w_out": Array((c.d_ff, c.embed), P(c.hidden, c.fsdp))}
    layer = {
        "attention_norm": {"scale": scale},
        "attention": attention_weights(c),
        "mlp_norm": {"scale": scale},
        "mlp": mlp or {**dense, **({"w_gate": into} if c.gated else {})},
    }
    found = {
        "embedding": Array((c.vocab, c.embed), P(c.hidden, c.fsdp)),
        "blocks": stacked(c.layers, layer),
        "final_norm": {"scale": scale},
    }
    if not c.tied:
        found["unembedding"] = Array((c.embed, c.vocab), P(c.fsdp, c.hidden))
    return found


def attention_layer(
    c: Decoder, mesh: Mesh, kernels: bool, x: jax.Array, w: Mapping[str, Any]
) -> jax.Array:
    """Returns what causal attention adds to the stream: [batch, length, embed]."""
    h = constrain(rms_norm(x, w["attention_norm"]["scale"]), mesh, c.data, c.context)
    w = w["attention"]
    grouped = c.group > 1
    q = jnp.einsum("ble,ehgk->blhgk" if grouped else "ble,ehk->blhk", h, w["query"])
    q = rotary(q if grouped else q[:, :, :, None])
    k = rotary(jnp.einsum("ble,ehk->blhk", h, w["key"]))
    v = jnp.einsum("ble,ehk->blhk", h, w["value"])
    spec = P(c.data, c.context, c.keys, c.queries)
    q = constrain(q, mesh, *spec)
    # Each device reads all positions of its heads' keys and values: a context is gathered here.
    k, v = (constrain(one, mesh, c.data, None, c.keys) for one in (k, v))
    mixed = constrain(attend(mesh, spec, q, k, v, True, kernels), mesh, *spec)
    if grouped:
        y = jnp.einsum("blhgk,hgke->ble", mixed, w["out"])
    else:
        y = jnp.einsum("blhk,hke->ble", mixed[:, :, :, 0], w["out"])
    return constrain(y, mesh, c.data, c.stream)


def shared_attention_layer(
    c: Decoder, mesh: Mesh, kernels: bool, x: jax.Array, w: Mapping[str, Any]
) -> jax.Array:
    """Returns what attention adds to the stream, where devices along `queries` share keys.

    Each of them computes the keys and values of its own positions, and they gather these. XLA's
    partitioner would compute all of them on each device, and reduce the gradients by the stream
    that come from queries and from keys one by one. So this runs inside of shard_map.
    """
    stored = {name: one.spec for name, one in attention_weights(c).items()}

    def local(h: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        w = {
            name: lax.all_gather(one, "data", axis=stored[name].index("data"), tiled=True)
            for name, one in w.items()
        }
        own = lax.all_gather(h, "keys", axis=1, tiled=True)
        k, v = (jnp.einsum("ble,ehk->blhk", own, w[name]) for name in ("key", "value"))
        k, v, h = (lax.all_gather(one, "queries", axis=1, tiled=True) for one in (k, v, own))
        q, k = rotary(jnp.einsum("ble,ehgk->blhgk", h, w["query"])), rotary(k)
        attended = splash if has_kernel(mesh, q, kernels) else attention
        y = jnp.einsum("blhgk,hgke->ble", attended(q, k, v, True), w["out"])
        y = lax.psum_scatter(y, "queries", scatter_dimension=1, tiled=True)
        return lax.psum_scatter(y, "keys", scatter_dimension=1, tiled=True)

    stream = P(c.data, c.stream)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(stream, stored), out_specs=stream, check_vma=False
    )
    h = constrain(rms_norm(x, w["attention_norm"]["scale"]), mesh, *stream)
    return run(h, {name: w["attention"][name] for name in stored})


def mlp_layer(c: Decoder, mesh: Mesh, x: jax.Array, w: Mapping[str, Any]) -> jax.Array:
    """Returns what the MLP adds to the stream."""
    h = constrain(rms_norm(x, w["mlp_norm"]["scale"]), mesh, c.data, c.context)
    w = w["mlp"]
    up = constrain(h @ w["w_in"], mesh, c.data, c.context, c.hidden)
    if c.gated:
        gate = constrain(h @ w["w_gate"], mesh, c.data, c.context, c.hidden)
        made = jax.nn.silu(gate) * up
    else:
        made = jax.nn.gelu(up)
    return constrain(made @ w["w_out"], mesh, c.data, c.stream)


def embedded(c: Decoder, mesh: Mesh, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the rows of the table for some tokens: [batch, length, embed]."""
    table = constrain(table, mesh, c.hidden)
    return constrain(jnp.take(table, tokens, axis=0), mesh, c.data, c.stream)


def token_loss(
    c: Decoder, mesh: Mesh, params: Mapping[str, Any], x: jax.Array, targets: jax.Array
) -> jax.Array:
    """Returns the mean negative log-likelihood of the targets."""
    x = rms_norm(x, params["final_norm"]["scale"].astype(x.dtype))
    x = constrain(x, mesh, c.data, c.context)
    if c.tied:
        logits = jnp.einsum("ble,ve->blv", x, params["embedding"].astype(x.dtype))
    else:
        logits = x @ params["unembedding"].astype(x.dtype)
    logits = constrain(logits, mesh, c.data, c.context, c.hidden)
    return jnp.mean(cross_entropy(logits, targets))


def loss(
    c: Decoder, mesh: Mesh, kernels: bool, dtype: Any, params: Any, batch: Mapping[str, Any]
) -> jax.Array:
    """Returns the loss of a batch; layers are scanned, and with `remat` recomputed."""
    of_attention = attention_layer if c.queries is None else shared_attention_layer

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = cast(w, dtype)
        x = x + of_attention(c, mesh, kernels, x, w)
        return x + mlp_layer(c, mesh, x, w), None

    x = embedded(c, mesh, params["embedding"].astype(dtype), batch["tokens"])
    run = jax.checkpoint(layer, prevent_cse=False) if c.remat else layer
    x, _ = lax.scan(run, x, params["blocks"])
    return token_loss(c, mesh, params, x, batch["targets"])


def tokens(c: Decoder) -> dict[str, Array]:
    """Returns the batch."""
    one = Array((c.batch, c.length), P(c.data, c.context), jnp.int32)
    return {"tokens": one, "targets": one}


def program(mesh: Mesh, c: Decoder, size: Size, kernels: bool) -> tuple[Any, Any, Any]:
    """Returns the training step of a decoder."""
    loss_of = partial(loss, c, mesh, kernels, compute_dtype(size))
    return training(mesh, loss_of, weights(c), tokens(c), adamw())


def dense(size: Size) -> Decoder:
    """Returns a decoder with one MLP for all tokens."""
    if size == "tpu":
        return Decoder(4, 4096, 32, 32, 16384, 32768, 64, 2048)
    return Decoder(2, 256, 8, 8, 1024, 512, 16, 128)


def llama(size: Size) -> Decoder:
    """Returns a decoder with grouped queries and a gated MLP."""
    if size == "tpu":
        return Decoder(4, 8192, 64, 8, 28672, 32768, 64, 2048, gated=True, tied=False)
    return Decoder(2, 256, 8, 4, 768, 512, 16, 128, gated=True, tied=False)


def decoder_fsdp_sequence(
    mesh: Mesh, size: Size = "tpu", kernels: bool = True
) -> tuple[Any, Any, Any]:
    """Axes data and model."""
    return program(mesh, dense(size), size, kernels)


def llama_fsdp_sequence(
    mesh: Mesh, size: Size = "tpu", kernels: bool = True
) -> tuple[Any, Any, Any]:
    """Axes data and model; each device along model has one head of keys, or more."""
    return program(mesh, llama(size), size, kernels)


def shared_keys(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axes data, keys and queries: several devices share a head of keys, which each of them has."""
    both = ("queries", "keys")  # what is gathered over keys is one range of positions
    c = replace(llama(size), stream=both, keys="keys", queries="queries", hidden=both)
    c = replace(c, kv_heads=4 if size == "tpu" else 2)
    return program(mesh, c, size, kernels)


def long_context_fsdp(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axes data and context: positions are split everywhere, and keys and values are gathered."""
    c = replace(dense(size), stream="context", context="context", keys=None, hidden=None)
    batch, length = (16, 8192) if size == "tpu" else (4, 512)
    return program(mesh, replace(c, batch=batch, length=length), size, kernels)
