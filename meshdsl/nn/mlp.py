"""Feed-forward layers: contract `over` into `hidden`, and back."""

from __future__ import annotations

from collections.abc import Callable

import meshdsl as md
from meshdsl.ops import gelu, silu
from meshdsl.tensors.dims import DimsLike


def mlp(
    x: md.Tensor,
    w_in: md.Tensor,
    w_out: md.Tensor,
    bias_in: md.Tensor | None = None,
    bias_out: md.Tensor | None = None,
    over: DimsLike = "embed",
    hidden: DimsLike = "d_ff",
    activation: Callable[[md.Tensor], md.Tensor] = gelu,
) -> md.Tensor:
    """Returns activation(x w_in + bias_in) w_out + bias_out.

    `md.checkpoint` knows the activation's input as `mlp_hidden`.
    """
    h = md.einsum(x, w_in, over=over)
    if bias_in is not None:
        h = h + bias_in
    y = md.einsum(activation(md.name(h, "mlp_hidden")), w_out, over=hidden)
    return y if bias_out is None else y + bias_out


def gated_mlp(
    x: md.Tensor,
    w_gate: md.Tensor,
    w_in: md.Tensor,
    w_out: md.Tensor,
    over: DimsLike = "embed",
    hidden: DimsLike = "d_ff",
    activation: Callable[[md.Tensor], md.Tensor] = silu,
) -> md.Tensor:
    """Returns (activation(x w_gate) * x w_in) w_out (Shazeer 2020, "GLU variants", equation 6).

    `md.checkpoint` knows its two products as `mlp_gate` and `mlp_hidden`.
    """
    gate = activation(md.name(md.einsum(x, w_gate, over=over), "mlp_gate"))
    h = md.name(md.einsum(x, w_in, over=over), "mlp_hidden")
    return md.einsum(gate * h, w_out, over=hidden)
