"""Normalisation over named dims.

Statistics are taken in float32 or wider; the result has the dtype of `x`, as have `scale` and
`bias`.
"""

from __future__ import annotations

import meshdsl as md
from meshdsl.dims import DimsLike
from meshdsl.nn.precision import at_least_float32


def rms_norm(
    x: md.Tensor, over: DimsLike, scale: md.Tensor | None = None, eps: float = 1e-6
) -> md.Tensor:
    """Returns x divided by its root mean square (Zhang and Sennrich 2019, equation 4).

    `nn.rms_norm(x, "embed", scale)`.

    Args:
        over: the dims that are normalised together.
        scale: a factor, by default 1.
        eps: added to the mean square.
    """
    wide = at_least_float32(x)
    y = md.cast(wide * md.rsqrt(md.mean(md.square(wide), over) + eps), x.dtype)
    return y if scale is None else y * scale


def layer_norm(
    x: md.Tensor,
    over: DimsLike,
    scale: md.Tensor | None = None,
    bias: md.Tensor | None = None,
    eps: float = 1e-5,
) -> md.Tensor:
    """Returns x with mean 0 and variance 1 (Ba, Kiros and Hinton 2016, equation 4).

    `nn.layer_norm(x, "embed", scale, bias)`.

    Args:
        over: the dims that are normalised together.
        scale: a factor, by default 1.
        bias: a summand, by default 0.
        eps: added to the variance.
    """
    wide = at_least_float32(x)
    centred = wide - md.mean(wide, over)
    y = md.cast(centred * md.rsqrt(md.mean(md.square(centred), over) + eps), x.dtype)
    if scale is not None:
        y = y * scale
    return y if bias is None else y + bias
