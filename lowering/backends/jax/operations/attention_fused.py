"""Fused attention kernels: cuDNN's on NVIDIA GPUs, splash attention on TPUs.

`kernel` answers with one where it does exactly what the instruction says. The gradient runs the
kernel's forward pass again before its backward pass, since JAX hands out neither with residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.lowering.backends.common.attention import HIDDEN, Attention

# (q, k, v) -> the result, or with its log-sum-exp [*lead, rows, 1].
Kernel = Callable[[jax.Array, jax.Array, jax.Array, bool], Any]


def kernel(attention: Attention, platform: str) -> Kernel | None:
    """Returns the kernel of a platform for an attention, or None where it has none that fits."""
    if platform in ("gpu", "cuda"):
        return _cudnn(attention)
    if platform == "tpu" and not jax.config.read("jax_enable_x64"):  # its indices are of 32 bits
        # Pallas takes long to import; `attention_splash` uses `heads_of` of this module.
        from meshdsl.lowering.backends.jax.operations.attention_splash import splash_kernel

        return splash_kernel(attention)
    return None


def heads_of(attention: Attention) -> tuple[int, int, int] | None:
    """Returns how many batches, heads of keys, and queries of each head there are."""
    words, sizes = attention.subscripts, attention.q.shape[:-2]
    shared = words["k"][:-2]
    if words["v"][:-2] != shared:
        return None
    own = math.prod(sizes[len(shared) :])
    held = sizes[: len(shared)] or (1,)
    return math.prod(held[:-1]), held[-1], own


def all_see(attention: Attention) -> bool:
    """Whether `causal` and the window leave every query something to see."""
    rows, columns = attention.q.shape[-2], attention.k.shape[-2]
    params = attention.params
    causal, window, offset = params["causal"], params["window"], params["offset"]
    if window is None:
        return offset >= 0 or not causal
    return offset >= 0 and rows + offset <= columns


def _cudnn(attention: Attention) -> Kernel | None:
    """cuDNN computes half precision, plain or causal, with features up to 128."""
    params, heads = attention.params, heads_of(attention)
    features, values = attention.q.shape[-1], attention.v.shape[-1]
    plain = not attention.masks and params["soft_cap"] is None and params["offset"] == 0
    fits = features == values and features <= 128 and features % 8 == 0
    half = attention.q.dtype in (jnp.bfloat16, jnp.float16)
    one_sided = params["window"] is None or params["causal"]
    if heads is None or not (plain and fits and half and one_sided and all_see(attention)):
        return None
    batch, shared, own = heads
    window = None if params["window"] is None else (params["window"] - 1, 0)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, with_sums: bool) -> Any:
        def laid(x: jax.Array, count: int) -> jax.Array:
            return x.reshape(batch, count, *x.shape[-2:]).swapaxes(1, 2)

        found: Any = jax.nn.dot_product_attention(
            laid(q, shared * own),
            laid(k, shared),
            laid(v, shared),
            scale=params["scale"],
            is_causal=params["causal"],
            local_window_size=window,
            implementation="cudnn",
            return_residual=with_sums,  # type: ignore[call-overload]
        )
        mixed = (found[0] if with_sums else found).swapaxes(1, 2)
        mixed = mixed.reshape(*q.shape[:-1], values)
        if not with_sums:
            return mixed
        return mixed, found[1].swapaxes(1, 2).reshape(*q.shape[:-1], 1)

    return attend


def fused_gradients(
    attend: Kernel, attention: Attention, sums: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the gradients by q, k and v; rows that see nothing have none."""
    cotangent = jnp.where(sums > HIDDEN, cotangent, 0).astype(attention.v.dtype)
    _, back = jax.vjp(lambda q, k, v: attend(q, k, v, False), attention.q, attention.k, attention.v)
    return back(cotangent)
