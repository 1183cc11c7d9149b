"""Feed-forward layers: contract `over` into `hidden`, and back."""

from __future__ import annotations

from collections.abc import Callable

import meshdsl as md
from meshdsl.ops import gelu, silu
from meshdsl.ops.operation import layer
from meshdsl.tensors.dims import DimsLike


@layer
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

    Examples:
        >>> x = md.named([[1.0, -1.0]], ["batch", "embed"])
        >>> w_in = md.named([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]], ["embed", "d_ff"])
        >>> w_out = md.ones(md.dims(d_ff=3, embed=2))
        >>> print(md.nn.mlp(x, w_in, w_out, activation=md.relu))
        f32[batch=1, embed=2] [[3. 3.]]
    """
    mlp_hidden = md.einsum(x, w_in, over=over)
    if bias_in is not None:
        mlp_hidden = mlp_hidden + bias_in
    activated = activation(md.name(mlp_hidden, "mlp_hidden"))
    mlp_out = md.einsum(activated, w_out, over=hidden)
    if bias_out is not None:
        mlp_out = mlp_out + bias_out
    return mlp_out


@layer
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

    Examples:
        >>> x = md.ones(md.dims(batch=2, embed=3))
        >>> w_gate = w_in = md.ones(md.dims(embed=3, d_ff=8))
        >>> w_out = md.ones(md.dims(d_ff=8, embed=3))
        >>> print(md.nn.gated_mlp(x, w_gate, w_in, w_out, activation=md.relu))
        f32[batch=2, embed=3] [[72. 72. 72.]
         [72. 72. 72.]]
    """
    mlp_gate = md.name(md.einsum(x, w_gate, over=over), "mlp_gate")
    gate = activation(mlp_gate)
    mlp_hidden = md.name(md.einsum(x, w_in, over=over), "mlp_hidden")
    mlp_out = md.einsum(gate * mlp_hidden, w_out, over=hidden)
    return mlp_out
