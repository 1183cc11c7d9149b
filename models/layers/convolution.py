"""Convolutions and norms of images and volumes, whose last dim is `channels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import meshdsl as md
from meshdsl import nn
from meshdsl.models.layers.drawing import Drawing
from meshdsl.tensors.dims import Dimension

NormKind: TypeAlias = Literal["batch", "group", "none"]
Moments: TypeAlias = tuple[md.Tensor, md.Tensor]  # mean and variance: channels


class Statistics:
    """The statistics of a model's batch norms, in the order in which they are met.

    In training each norm takes those of its batch, and they are collected in `found`. In inference
    each is given those of the training data, kept from before.
    """

    def __init__(self, given: Sequence[Moments] | None = None) -> None:
        self._given: Iterator[Moments] | None = None if given is None else iter(given)
        self.found: list[Moments] = []

    def norm(self, x: md.Tensor, scale: md.Tensor, bias: md.Tensor) -> md.Tensor:
        over = x.shape.without(["channels"])
        given = None if self._given is None else next(self._given)
        y, moments = nn.batch_norm(x, over, scale, bias, statistics=given)
        self.found.append(moments)
        return y


class ChannelNorm(md.Module):
    """Batch norm, or group norm."""

    scale: md.Tensor  # channels
    bias: md.Tensor  # channels
    groups: int | None = md.static()

    def __call__(self, x: md.Tensor, statistics: Statistics) -> md.Tensor:
        if self.groups is None:
            return statistics.norm(x, self.scale, self.bias)
        space = x.shape.without(["batch", "channels"])
        return nn.group_norm(x, space, "channels", self.groups, self.scale, self.bias)


class Convolution(md.Module):
    """A convolution without bias, and a norm, or else a bias.

    A dim `height` of the input meets the dim `filter_height` of the weights, and so on.
    """

    weights: md.Tensor  # filter_height, filter_width, channels_in, channels
    bias: md.Tensor | None  # channels
    norm: ChannelNorm | None
    stride: int = md.static()
    transposed: bool = md.static()

    def __call__(self, x: md.Tensor, statistics: Statistics) -> md.Tensor:
        windows = [name for name in self.weights.shape.names if name.startswith("filter_")]
        spatial = {name.removeprefix("filter_"): name for name in windows}
        if self.transposed:
            padding: str | dict[str, int] = "valid"
        else:
            padding = {d: (self.weights.shape.get(w).size - 1) // 2 for d, w in spatial.items()}
        convolve = md.conv_transpose if self.transposed else md.conv
        x = convolve(
            x, self.weights, spatial, {"channels": "channels_in"}, "channels", self.stride, padding
        )
        if self.bias is not None:
            x = x + self.bias
        return x if self.norm is None else self.norm(x, statistics)


def init_convolution(
    draw: Drawing,
    space: Sequence[str],
    sizes: tuple[int, int],
    kernel: int,
    stride: int = 1,
    norm: NormKind = "none",
    groups: int = 1,
    transposed: bool = False,
) -> Convolution:
    """Returns a convolution that keeps the variance of what a ReLU leaves.

    He et al. 2015, "Delving deep into rectifiers", section 2.2.

    Args:
        space: the dims that it slides along.
        sizes: channels that go in, and that come out.
        kernel: the size of its window along each.
        groups: of a group norm, as far as they divide the channels.
    """
    windows = [Dimension(f"filter_{name}", kernel) for name in space]
    before, after = md.dims(channels_in=sizes[0], channels=sizes[1])
    summed = [before] if transposed else [*windows, before]
    made = None
    if norm != "none":
        count = next(n for n in range(min(groups, after.size), 0, -1) if after.size % n == 0)
        made = ChannelNorm(
            draw.ones([after]), draw.zeros([after]), count if norm == "group" else None
        )
    return Convolution(
        weights=draw.into(summed, [*windows, before, after], 2**0.5),
        bias=draw.zeros([after]) if norm == "none" else None,
        norm=made,
        stride=stride,
        transposed=transposed,
    )
