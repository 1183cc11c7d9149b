"""Fused attention kernels: cuDNN's on NVIDIA GPUs, splash attention on TPUs.

`kernel` returns a kernel only if that computes exactly what the instruction says. JAX keeps the
log-sum-exp of a kernel's forward pass for its backward pass, but has no public function for either
alone. Both are in the pullback that `jax.vjp` returns, a tree of arrays: the forward pass takes the
log-sum-exp from there, in float32, and the backward pass puts in the result and the log-sum-exp
that the program has kept. Then nothing needs the forward pass of that pullback, and the compiler
drops it. What is put in may be of more keys than the kernel sees, as for parts of a memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.lowering.backends.common.attention import HIDDEN, Attention
from meshdsl.lowering.backends.compiler_flags import GPUS


@dataclass(frozen=True)
class Kernel:
    """A fused kernel for an attention instruction.

    Attributes:
        compute: (q, k, v) -> the result, in the kernel's order of dims: [batch, heads, positions,
            features], or positions before heads. JAX can differentiate it.
        heads: the numbers of batches, of heads of keys, and of query heads for each of them.
        positions_first: whether positions come before heads.
        scale: what queries are multiplied by before `compute`.
        hides: whether rows may be hidden as a whole.
    """

    compute: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    heads: tuple[int, int, int]
    positions_first: bool = False
    scale: float | None = None
    hides: bool = False

    def forward(self, attention: Attention) -> tuple[jax.Array, jax.Array] | None:
        """Returns the result and its log-sum-exp in float32, [*lead, rows, values or 1].

        None: this version of JAX does not keep the log-sum-exp.
        """
        out, pullback = jax.vjp(self.compute, *self._operands(*_of(attention)))
        kept = self._kept(out, pullback)
        if kept is None:
            return None
        lead = attention.q.shape[:-1]
        result = self._ordered(out).reshape(*lead, -1)
        sums = jax.tree.leaves(pullback)[kept[1]].reshape(*lead, 1)
        if self.hides:
            result, sums = jnp.where(sums > HIDDEN, result, 0), jnp.maximum(sums, HIDDEN)
        return result, sums

    def gradients(
        self, attention: Attention, result: jax.Array, sums: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, ...] | None:
        """Returns the gradients by q, k and v; rows whose scores are all hidden add nothing.

        Args:
            result, sums: of all keys, [*lead, rows, values or 1]; these may be more than k has.

        None: as in `forward`.
        """
        operands, of_operands = jax.vjp(self._operands, *_of(attention))
        out, pullback = jax.vjp(self.compute, *operands)
        kept = self._kept(out, pullback)
        if kept is None:
            return None
        leaves, tree = jax.tree.flatten(pullback)
        of_out, of_sums = kept
        leaves[of_out] = self._arranged(result, *self._query_heads).astype(out.dtype)
        leaves[of_sums] = sums.astype(jnp.float32).reshape(leaves[of_sums].shape)
        cotangent = jnp.where(sums > HIDDEN, cotangent, 0) if self.hides else cotangent
        cotangent = self._arranged(cotangent, *self._query_heads).astype(out.dtype)
        return of_operands(jax.tree.unflatten(tree, leaves)(cotangent))

    @property
    def _query_heads(self) -> tuple[int, int]:
        batch, key_heads, group = self.heads
        return batch, key_heads * group

    def _operands(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the operands in the kernel's order."""
        if self.scale is not None:
            q = q * jnp.asarray(self.scale, q.dtype)
        of_keys = (self._arranged(x, *self.heads[:2]) for x in (k, v))
        return self._arranged(q, *self._query_heads), *of_keys

    def _arranged(self, x: jax.Array, batch: int, heads: int) -> jax.Array:
        return self._ordered(x.reshape(batch, heads, *x.shape[-2:]))

    def _ordered(self, x: jax.Array) -> jax.Array:
        """Returns [batch, heads, positions, features] in the kernel's order, or the reverse."""
        return x.swapaxes(1, 2) if self.positions_first else x

    def _kept(self, out: jax.Array, pullback: Any) -> tuple[int, int] | None:
        """Returns which leaves of a pullback are the result and its log-sum-exp."""
        rows = out.shape[1] if self.positions_first else out.shape[2]
        shape = (*self._query_heads, rows)
        leaves = list(enumerate(jax.tree.leaves(pullback)))
        of_out = [n for n, leaf in leaves if leaf is out]
        of_sums = [n for n, x in leaves if x.shape == shape and x.dtype == jnp.float32]
        if len(of_out) == len(of_sums) == 1:
            return of_out[0], of_sums[0]
        warnings.warn(
            f"JAX {jax.__version__} keeps no log-sum-exp where meshdsl looks for it, so attention "
            "runs without a fused kernel, and slower. Use a version of JAX that meshdsl is tested "
            "with: 0.10 or 0.11",
            stacklevel=2,
        )
        return None


def _of(attention: Attention) -> tuple[jax.Array, jax.Array, jax.Array]:
    return attention.q, attention.k, attention.v


def kernel(attention: Attention, platform: str) -> Kernel | None:
    """Returns a platform's kernel for an attention; None: it has none that fits."""
    if platform in GPUS:
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
    window = None if params["window"] is None else (params["window"] - 1, 0)

    def compute(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=params["scale"],
            is_causal=params["causal"],
            local_window_size=window,
            implementation="cudnn",
        )

    return Kernel(compute, heads, positions_first=True)
