"""Fused attention kernels: cuDNN's on NVIDIA GPUs, splash attention on TPUs.

`kernel` returns a kernel only if that computes exactly what the instruction says. The gradient runs
the kernel's forward pass again: JAX does not return the residuals of either kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.lowering.backends.common.attention import HIDDEN, Attention

# (q, k, v, with_sums) -> the result; with_sums: also its log-sum-exp [*lead, rows, 1].
Kernel = Callable[[jax.Array, jax.Array, jax.Array, bool], Any]


def kernel(attention: Attention, platform: str) -> Kernel | None:
    """Returns a platform's kernel for an attention; None: it has none that fits."""
    if platform in ("gpu", "cuda"):
        return _cudnn(attention)
    if platform == "tpu" and not jax.config.read("jax_enable_x64"):  # its indices are of 32 bits
        # Pallas takes long to import; `attention_splash` uses `heads_of` of this module.
        from meshdsl.lowering.backends.jax.operations.attention_splash import splash_kernel

        return splash_kernel(attention)
    return None


def heads_of(attention: Attention) -> tuple[int, int, int] | None:
    """Returns the numbers of batches, of heads of keys, and of query heads for each of them.

    None: keys and values differ in their lead dims.
    """
    subscripts, sizes = attention.subscripts, attention.q.shape[:-2]
    shared = subscripts["k"][:-2]
    if subscripts["v"][:-2] != shared:
        return None
    group = math.prod(sizes[len(shared) :])
    key_sizes = sizes[: len(shared)] or (1,)
    return math.prod(key_sizes[:-1]), key_sizes[-1], group


def all_rows_visible(attention: Attention) -> bool:
    """Whether every query has a visible score under `causal` and the window."""
    rows, columns = attention.q.shape[-2], attention.k.shape[-2]
    params = attention.params
    causal, window, offset = params["causal"], params["window"], params["offset"]
    if window is None:
        return offset >= 0 or not causal
    return offset >= 0 and rows + offset <= columns


def _cudnn(attention: Attention) -> Kernel | None:
    """Returns cuDNN's kernel, for half precision, without masks, with features up to 128."""
    params, heads = attention.params, heads_of(attention)
    features, values = attention.q.shape[-1], attention.v.shape[-1]
    plain = not attention.masks and params["soft_cap"] is None and params["offset"] == 0
    fits = features == values and features <= 128 and features % 8 == 0
    half = attention.q.dtype in (jnp.bfloat16, jnp.float16)
    one_sided = params["window"] is None or params["causal"]
    if heads is None or not (plain and fits and half and one_sided and all_rows_visible(attention)):
        return None
    batch, key_heads, group = heads
    window = None if params["window"] is None else (params["window"] - 1, 0)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, with_sums: bool) -> Any:
        def heads_last(x: jax.Array, count: int) -> jax.Array:
            """Returns x as [batch, rows, heads, features]."""
            return x.reshape(batch, count, *x.shape[-2:]).swapaxes(1, 2)

        results: Any = jax.nn.dot_product_attention(
            heads_last(q, key_heads * group),
            heads_last(k, key_heads),
            heads_last(v, key_heads),
            scale=params["scale"],
            is_causal=params["causal"],
            local_window_size=window,
            implementation="cudnn",
            return_residual=with_sums,  # type: ignore[call-overload]
        )
        result = (results[0] if with_sums else results).swapaxes(1, 2)
        result = result.reshape(*q.shape[:-1], values)
        if not with_sums:
            return result
        return result, results[1].swapaxes(1, 2).reshape(*q.shape[:-1], 1)

    return attend


def fused_gradients(
    attend: Kernel, attention: Attention, sums: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the gradients by q, k and v; rows whose scores are all hidden add nothing."""
    cotangent = jnp.where(sums > HIDDEN, cotangent, 0).astype(attention.v.dtype)
    _, pullback = jax.vjp(
        lambda q, k, v: attend(q, k, v, False), attention.q, attention.k, attention.v
    )
    return pullback(cotangent)
