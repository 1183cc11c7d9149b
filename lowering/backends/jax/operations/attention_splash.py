"""Pallas splash attention, the fused kernel on TPUs; it skips blocks that are hidden."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from meshdsl.lowering.backends.common.attention import Attention
from meshdsl.lowering.backends.jax.operations.attention_fused import (
    Kernel,
    all_rows_visible,
    heads_of,
)

LANES = 128


def splash_kernel(attention: Attention, interpret: bool = False) -> Kernel | None:
    """Returns the kernel for lengths in multiples of 128, with soft caps, windows and segments."""
    params, heads, masks = attention.params, heads_of(attention), attention.masks
    rows, columns = attention.q.shape[-2], attention.k.shape[-2]
    supported = set(masks) <= {"segments", "memory_segments"}
    even = rows % LANES == 0 and columns % LANES == 0
    dtype = attention.q.dtype in (jnp.bfloat16, jnp.float32)
    if heads is None or not (supported and even and dtype and all_rows_visible(attention)):
        return None
    batch, key_heads, group = heads
    lead = attention.q.shape[:-2]
    varying = (
        len(attention.subscripts["k"]) - 2 - 1
    )  # segments may vary over all shared dims but the last
    if any(mask.shape[i] > 1 for mask in masks.values() for i in range(max(varying, 0), len(lead))):
        return None
    settings: dict[str, Any] = {
        "mask": splash.MultiHeadMask([_mask(attention, rows, columns)] * (key_heads * group)),
        "block_sizes": block_sizes(rows, columns),
        "attn_logits_soft_cap": params["soft_cap"],
        "head_shards": 1,
        "q_seq_shards": 1,
        "interpret": interpret,
    }

    def segments(name: str, length: int) -> jax.Array:
        mask = masks[name].reshape(*masks[name].shape[: len(lead)], length)
        full = jnp.broadcast_to(mask, (*lead[: max(varying, 0)], *mask.shape[max(varying, 0) :]))
        return full.reshape(batch, length)

    run = splash.make_splash_mha(**settings)

    def compute(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        ids = None
        if masks:
            ids = splash.SegmentIds(
                segments("segments", rows), segments("memory_segments", columns)
            )
        return jax.vmap(run)(q, k, v, ids)

    return Kernel(compute, heads, scale=params["scale"], hides=bool(masks))


def _mask(attention: Attention, rows: int, columns: int) -> Any:
    """Returns the kernel's mask for `causal` and the window."""
    params = attention.params
    causal, window, offset = params["causal"], params["window"], params["offset"]
    if window is not None:
        sides = (window - 1, 0 if causal else window - 1)
        return splash.LocalMask((rows, columns), window_size=sides, offset=offset)
    if causal:
        return splash.CausalMask((rows, columns), offset=offset)
    return splash.FullMask((rows, columns))


def block_sizes(rows: int, columns: int) -> splash.BlockSizes:
    """Returns the largest block sizes that divide the lengths."""
    q, kv = (max(b for b in (128, 256, 512) if size % b == 0) for size in (rows, columns))
    return splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_kv_compute=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_kv_dkv_compute=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
