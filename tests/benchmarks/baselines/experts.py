"""Experts on different devices, with a capacity: tokens travel by all_to_all, inside of shard_map.

Every device has some sequences and some experts. Each token is copied into a slot of its experts,
in order (Lepikhin et al. 2021, "GShard", algorithm 1), by gathers instead of products with one-hot
tensors. A slot has at most one token, so the gradient of either gather is a gather too.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.benchmarks.baselines.decoder import (
    Decoder,
    attention_layer,
    dense,
    embedded,
    token_loss,
    tokens,
    weights,
)
from tests.benchmarks.baselines.parts import (
    Array,
    Size,
    adamw,
    cast,
    compute_dtype,
    constrain,
    rms_norm,
    training,
)

BOTH = ("data", "expert")
CHOICES, CAPACITY = 2, 1.25


@jax.custom_vjp
def rearranged(x: jax.Array, source: jax.Array, readers: jax.Array) -> jax.Array:
    """Returns rows of x: result[i] = x[source[i]], zeros where there is no such row.

    Args:
        readers: [rows of x, readers of a row]: where a row went, for the gradient.
    """
    del readers
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


def _forward(x: jax.Array, source: jax.Array, readers: jax.Array) -> tuple[jax.Array, Any]:
    return rearranged(x, source, readers), readers


def _backward(readers: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    read = jnp.take(cotangent, readers, axis=0, mode="fill", fill_value=0)
    return jnp.sum(read, axis=1), None, None


rearranged.defvjp(_forward, _backward)


def places(chosen: jax.Array, experts: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Returns the slots of a sequence's tokens, and who sits in each slot.

    Args:
        chosen: [length, choice]: the experts of a token.

    Returns:
        seats: [length, choice], and sitting: [experts * slots], a number of `choice, length`. One
        past the end means none.
    """
    length, choices = chosen.shape
    order = chosen.T.reshape(-1)  # all first choices come before all second ones
    marks = jax.nn.one_hot(order, experts, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(marks, axis=0) - marks) * marks, axis=-1)
    seats = jnp.where(place < slots, order * slots + place, experts * slots)
    nobody = jnp.full((experts * slots,), choices * length, jnp.int32)
    everybody = jnp.arange(choices * length, dtype=jnp.int32)
    sitting = nobody.at[seats].set(everybody, mode="drop", unique_indices=True)
    return seats.reshape(choices, length).T, sitting


def exchange(
    slots: int,
    experts: int,
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    w: Mapping[str, jax.Array],
) -> jax.Array:
    """Returns what the experts add, on one device: [sequences, length, embed].

    Args:
        x: [sequences, length, embed].
        chosen, weight: [sequences, length, choice].
        w: the weights of this device's experts, as stored.
    """
    w = {
        name: lax.all_gather(one, "data", axis=_split(name), tiled=True) for name, one in w.items()
    }
    length = x.shape[1]
    seats, sitting = jax.vmap(partial(places, experts=experts, slots=slots))(chosen)
    # A slot reads the token of its assignment; no assignment is past the end of the tokens.
    source = jnp.where(sitting < CHOICES * length, sitting % length, length)
    sent = jax.vmap(rearranged)(x, source, seats)
    sent = sent.reshape(x.shape[0], experts, slots, -1)
    here = lax.all_to_all(sent, "expert", split_axis=1, concat_axis=0, tiled=True)
    up = jnp.einsum("bxse,xef->bxsf", here, w["w_in"])
    gate = jnp.einsum("bxse,xef->bxsf", here, w["w_gate"])
    made = jnp.einsum("bxsf,xfe->bxse", jax.nn.silu(gate) * up, w["w_out"])
    back = lax.all_to_all(made, "expert", split_axis=0, concat_axis=1, tiled=True)
    back = back.reshape(x.shape[0], experts * slots, -1)

    def read(back: jax.Array, seats: jax.Array, sitting: jax.Array) -> jax.Array:
        """Returns [choice * length, embed]."""
        return rearranged(back, seats.T.reshape(-1), sitting[:, None])

    read_back = jax.vmap(read)(back, seats, sitting).reshape(x.shape[0], CHOICES, length, -1)
    return jnp.einsum("bcle,blc->ble", read_back, weight.astype(x.dtype))


def _split(name: str) -> int:
    """Returns which dim of an expert's weights is stored split: embed."""
    return 2 if name == "w_out" else 1


def experts_layer(
    c: Decoder, experts: int, mesh: Mesh, x: jax.Array, w: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Returns what the experts add to the stream, and the losses of the router."""
    h = rms_norm(x, w["mlp_norm"]["scale"])
    w = w["mlp"]
    logits = h.astype(jnp.float32) @ w["router"].astype(jnp.float32)
    chances = jax.nn.softmax(logits, axis=-1)
    weight, chosen = lax.top_k(chances, CHOICES)
    weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    used = jnp.mean(jax.nn.one_hot(chosen, experts, dtype=jnp.float32), axis=(0, 1, 2))
    balance = experts * jnp.sum(used * jnp.mean(chances, axis=(0, 1)))
    z = jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    slots = math.ceil(CAPACITY * c.length * CHOICES / experts)
    stored = {name: one.spec for name, one in expert_weights(c, experts).items()}
    run = jax.shard_map(
        partial(exchange, slots, experts),
        mesh=mesh,
        in_specs=(P(BOTH), P(BOTH), P(BOTH), stored),
        out_specs=P(BOTH),
        check_vma=False,
    )
    y = run(h, chosen, weight, {name: w["experts"][name] for name in stored})
    return constrain(y, mesh, BOTH), 0.01 * balance + 0.001 * z


def expert_weights(c: Decoder, experts: int) -> dict[str, Array]:
    """Returns the weights of the experts of one layer."""
    into = Array((experts, c.embed, c.d_ff), P("expert", "data"))
    out = Array((experts, c.d_ff, c.embed), P("expert", None, "data"))
    return {"w_in": into, "w_gate": into, "w_out": out}


def loss(
    c: Decoder,
    experts: int,
    mesh: Mesh,
    kernels: bool,
    dtype: Any,
    params: Any,
    batch: Mapping[str, Any],
) -> jax.Array:
    """Returns the loss of a batch, with those of the routers."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        w = cast(w, dtype)
        x = x + attention_layer(c, mesh, kernels, x, w)
        y, router_loss = experts_layer(c, experts, mesh, x, w)
        return x + y, router_loss

    x = embedded(c, mesh, params["embedding"].astype(dtype), batch["tokens"])
    layer_of_scan = jax.checkpoint(layer, prevent_cse=False)
    x, router_losses = lax.scan(layer_of_scan, x, params["blocks"])
    return token_loss(c, mesh, params, x, batch["targets"]) + jnp.mean(router_losses)


def experts(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axes data and expert; sequences are split over both."""
    c = replace(dense(size), gated=True, tied=False, data=BOTH, stream=None, keys=None, hidden=None)
    c = replace(c, **SIZES[size])
    count = 16 if size == "tpu" else 8
    mlp = {
        "router": Array((c.embed, count), P("data")),
        "experts": expert_weights(c, count),
    }
    loss_of = partial(loss, c, count, mesh, kernels, compute_dtype(size))
    return training(mesh, loss_of, weights(c, mlp), tokens(c), adamw())


SIZES: Mapping[Size, Mapping[str, int]] = {
    "tpu": {"kv_heads": 8, "d_ff": 14336, "batch": 128},
    "small": {"kv_heads": 4, "d_ff": 384, "batch": 16},
}
