"""Normalisation over named dims.

Statistics are computed in float32 or wider. The result has the dtype of `x`; so must `scale` and
`bias`.
"""

from __future__ import annotations

import meshdsl as md
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import DimLike, DimsLike, as_list


@operation
def rms_norm(
    x: md.Tensor, over: DimsLike, scale: md.Tensor | None = None, eps: float = 1e-6
) -> md.Tensor:
    """Returns x divided by its root mean square (Zhang and Sennrich 2019, equation 4).

    `nn.rms_norm(x, "embed", scale)`.

    Args:
        over: the dims that are normalised together.
        scale: a factor, by default 1.
        eps: added to the mean square.

    Examples:
        >>> x = md.named([[3.0, 4.0], [0.0, 1.0]], ["batch", "embed"])
        >>> print(md.nn.rms_norm(x, "embed") ** 2)
        f32[batch=2, embed=2] [[0.72 1.28]
         [0.   2.  ]]
    """
    wide = at_least_float32(x)
    normed = md.cast(wide * md.rsqrt(md.mean(md.square(wide), over) + eps), x.dtype)
    return _scaled(normed, scale, None)


@operation
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

    Examples:
        >>> x = md.named([[1.0, 3.0], [10.0, 30.0]], ["batch", "embed"])
        >>> scale = md.named([1.0, 2.0], ["embed"])
        >>> print(md.nn.layer_norm(x, "embed", scale, eps=0.0))
        f32[batch=2, embed=2] [[-1.  2.]
         [-1.  2.]]
    """
    wide = at_least_float32(x)
    centred = wide - md.mean(wide, over)
    normed = md.cast(centred * md.rsqrt(md.mean(md.square(centred), over) + eps), x.dtype)
    return _scaled(normed, scale, bias)


@operation
def group_norm(
    x: md.Tensor,
    over: DimsLike,
    channels: DimLike,
    groups: int,
    scale: md.Tensor | None = None,
    bias: md.Tensor | None = None,
    eps: float = 1e-5,
) -> md.Tensor:
    """Returns x with mean 0 and variance 1 in each group of channels (Wu and He 2018, equation 7).

    `nn.group_norm(x, ["height", "width"], "channels", 8, scale, bias)`.

    Args:
        over: the dims that are normalised together with the channels of a group.
        channels: the dim that is divided into groups.
        groups: how many; they divide the channels.
        scale: a factor per channel, by default 1.
        bias: a summand per channel, by default 0.
        eps: added to the variance.

    Raises:
        ValueError: the channels do not divide into the groups.

    Examples:
        >>> x = md.named([[1.0, 3.0, 10.0, 30.0]], ["height", "channels"])
        >>> print(md.nn.group_norm(x, "height", "channels", groups=2, eps=0.0))
        f32[height=1, channels=4] [[-1.  1. -1.  1.]]
    """
    channel = x.shape.get(channels)
    if channel.size % groups:
        raise ValueError(f"{channel} channels do not divide into {groups} groups")
    parts = md.dims(channel_group=groups, channel_of_group=channel.size // groups)
    if as_list(over):
        normed = _normalised_groups(x, over, channel, parts, eps)
    else:  # nothing makes the sums smaller than x before the channels are split
        normed = layer_norm(x.split(channel, parts), parts[1], eps=eps).merge(parts, channel)
    return _scaled(normed, scale, bias)


@operation
def batch_norm(
    x: md.Tensor,
    over: DimsLike,
    scale: md.Tensor | None = None,
    bias: md.Tensor | None = None,
    eps: float = 1e-5,
    statistics: tuple[md.Tensor, md.Tensor] | None = None,
) -> tuple[md.Tensor, tuple[md.Tensor, md.Tensor]]:
    """Returns x with mean 0 and variance 1 in each channel, and the statistics it used.

    `y, (mean, variance) = nn.batch_norm(x, ["batch", "height", "width"], scale, bias)` (Ioffe and
    Szegedy 2015, algorithms 1 and 2).

    Args:
        over: the dims that are normalised together: all but the channels.
        scale: a factor per channel, by default 1.
        bias: a summand per channel, by default 0.
        eps: added to the variance.
        statistics: mean and variance to use instead of those of x, as in inference.

    Examples:
        >>> x = md.named([[1.0, 10.0], [3.0, 30.0]], ["batch", "channels"])
        >>> y, (mean, variance) = md.nn.batch_norm(x, "batch", eps=0.0)
        >>> print(y, mean, variance)
        f32[batch=2, channels=2] [[-1. -1.]
         [ 1.  1.]] f32[channels=2] [ 2. 20.] f32[channels=2] [  1. 100.]
    """
    wide = at_least_float32(x)
    if statistics is None:
        mean = md.mean(wide, over)
        statistics = mean, md.mean(md.square(wide - mean), over)
    mean, variance = (md.cast(one, wide.dtype) for one in statistics)
    normed = md.cast((wide - mean) * md.rsqrt(variance + eps), x.dtype)
    return _scaled(normed, scale, bias), statistics


def _scaled(normed: md.Tensor, scale: md.Tensor | None, bias: md.Tensor | None) -> md.Tensor:
    if scale is not None:
        normed = normed * scale
    if bias is not None:
        normed = normed + bias
    return normed


def _normalised_groups(
    x: md.Tensor, over: DimsLike, channel: md.Dimension, parts: tuple[md.Dimension, ...], eps: float
) -> md.Tensor:
    """Returns x with mean 0 and variance 1 over some dims and each group of channels."""
    wide = at_least_float32(x)
    centred = wide - _group_mean(wide, over, channel, parts)
    variance = _group_mean(md.square(centred), over, channel, parts)
    return md.cast(centred * md.rsqrt(variance + eps), x.dtype)


def _group_mean(
    x: md.Tensor, over: DimsLike, channel: md.Dimension, parts: tuple[md.Dimension, ...]
) -> md.Tensor:
    """Returns the mean over some dims and a group of channels, for each of its channels."""
    # The other dims go first: only what is as small as the channels is split into groups, so a
    # layout that splits the channels moves sums, never activations.
    group, member = parts
    means = md.mean(md.mean(x, over).split(channel, parts), member)
    shape = [d for dim in means.shape for d in ([dim, member] if dim == group else [dim])]
    return means.broadcast(shape).merge(parts, channel)
