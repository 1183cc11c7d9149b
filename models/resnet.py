"""Residual networks that classify images (He et al. 2016, "Deep residual learning").

With batch norm, `features` takes the statistics of its batch and returns them. For inference, give
it those of the training data: `mean_statistics` of a few batches, with the parameters as they are
at the end (Wu and Johnson 2021, "Rethinking 'batch' in BatchNorm", section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import values_out_of_range
from meshdsl.models.layers.convolution import (
    Convolution,
    Moments,
    NormKind,
    Statistics,
    init_convolution,
)
from meshdsl.models.layers.drawing import Drawing
from meshdsl.models.model import Model
from meshdsl.tensors.named_array import Spec

SPACE = ("height", "width")


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes and kinds of the parts of a residual network.

    Attributes:
        blocks: how many, in each stage; overridden as "blocks=2+2+2+2".
        filters: of each stage; a bottleneck block leaves 4 times as many.
        strides: of the first block of each stage.
        block: "bottleneck" (1x1, 3x3, 1x1) or "basic" (3x3, 3x3).
        stem: filters of the first convolution, 7x7 with stride 2, before pooling by 2.
        norm: "batch", or "group" of `groups` groups, which does not mix images.
        classes: what images are told apart into.
        colors: of a pixel.
        policy: the dtypes of parameters, computation, and scores.

    Raises:
        ValueError: stages of different numbers, or sizes that are too small; all told.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    filters: tuple[int, ...] = (64, 128, 256, 512)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    block: Literal["bottleneck", "basic"] = "bottleneck"
    stem: int = 64
    norm: NormKind = "batch"
    groups: int = 32
    classes: int = 1000
    colors: int = 3
    policy: md.Policy = field(default_factory=md.Policy)

    def __post_init__(self) -> None:
        problems = values_out_of_range(self)
        lengths = {n: len(getattr(self, n)) for n in ("blocks", "filters", "strides")}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} of {n}" for name, n in lengths.items())
            problems.append(f"each stage needs one number of each: {told}")
        if problems:
            raise ValueError("; ".join(problems))


class ResidualBlock(md.Module):
    """Convolutions, with a ReLU after each, and after the last one the sum with what came in."""

    layers: list[Convolution]
    shortcut: Convolution | None

    def __call__(self, x: md.Tensor, statistics: Statistics) -> md.Tensor:
        y = x
        for layer in self.layers[:-1]:
            y = md.relu(layer(y, statistics))
        y = self.layers[-1](y, statistics)
        kept = x if self.shortcut is None else self.shortcut(x, statistics)
        return md.relu(kept + y)


class ResNet(md.Module):
    """All parameters; `blocks` are those of all stages, in order."""

    stem: Convolution
    blocks: list[ResidualBlock]
    w_out: md.Tensor  # channels, classes
    bias_out: md.Tensor  # classes


def init(config: ResNetConfig, key: md.Tensor) -> ResNet:
    """Returns initial parameters; each block begins by passing on what comes in."""
    draw = Drawing(key, 4 * sum(config.blocks) + 2, config.policy.params)
    convolution = partial(init_convolution, draw, SPACE, norm=config.norm, groups=config.groups)
    stem = convolution((config.colors, config.stem), 7, 2)
    blocks, channels = [], config.stem
    for count, filters, stride in zip(config.blocks, config.filters, config.strides, strict=True):
        for number in range(count):
            step = stride if number == 0 else 1
            if config.block == "bottleneck":
                leaves = 4 * filters
                layers = [
                    convolution((channels, filters), 1),
                    convolution((filters, filters), 3, step),
                    convolution((filters, leaves), 1),
                ]
            else:
                leaves = filters
                layers = [
                    convolution((channels, filters), 3, step),
                    convolution((filters, filters), 3),
                ]
            layers[-1] = _silent(layers[-1])
            changes = step > 1 or channels != leaves
            shortcut = convolution((channels, leaves), 1, step) if changes else None
            blocks.append(ResidualBlock(layers, shortcut))
            channels = leaves
    last, classes = md.dims(channels=channels, classes=config.classes)
    return ResNet(stem, blocks, draw.into(last, [last, classes]), draw.zeros([classes]))


def _silent(layer: Convolution) -> Convolution:
    """Returns the layer with a norm that begins as zero (Goyal et al. 2017, section 5.1)."""
    assert layer.norm is not None
    return layer.replace(norm=layer.norm.replace(scale=layer.norm.scale * 0))


def features(
    config: ResNetConfig,
    params: ResNet,
    images: md.Tensor,
    statistics: Sequence[Moments] | None = None,
) -> tuple[md.Tensor, list[Moments]]:
    """Returns what the last block leaves, and the statistics that its norms used.

    Args:
        images: [batch, height, width, colors].
        statistics: of the batch norms, as returned before; None: those of this batch.

    Returns:
        [batch, height, width, channels], and mean and variance of each norm.
    """
    params, x = config.policy.to_compute((params, images))
    used = Statistics(statistics)
    x = md.relu(params.stem(x.rename(colors="channels"), used))
    x = md.max_pool(x, dict.fromkeys(SPACE, 3), strides=2, padding=1)
    for block in params.blocks:
        x = block(x, used)
    return x, used.found


def logits(
    config: ResNetConfig,
    params: ResNet,
    images: md.Tensor,
    statistics: Sequence[Moments] | None = None,
) -> md.Tensor:
    """Returns the scores of the classes: [batch, classes]; arguments as for `features`."""
    x, _ = features(config, params, images, statistics)
    w_out, bias_out = config.policy.to_compute((params.w_out, params.bias_out))
    return config.policy.to_output(md.einsum(md.mean(x, SPACE), w_out, over="channels") + bias_out)


def mean_statistics(batches: Sequence[Sequence[Moments]]) -> list[Moments]:
    """Returns statistics of several batches together, from those of each."""
    return [
        (sum(mean for mean, _ in one) / len(one), sum(var for _, var in one) / len(one))
        for one in zip(*batches, strict=True)
    ]


def loss(config: ResNetConfig, params: ResNet, batch: Mapping[str, Any]) -> md.Tensor:
    """Returns the mean negative log-likelihood of the labels, in nats."""
    scores = logits(config, params, batch["image"])
    return md.mean(nn.softmax_cross_entropy(scores, batch["label"], over="classes"))


def resnet(name: str, config: ResNetConfig, batch_size: int, length: int) -> Model:
    """Returns the model of a configuration; `length` is height and width of its images."""

    def batch_spec(batch_size: int, length: int) -> dict[str, Spec]:
        image = md.dims(batch=batch_size, height=length, width=length, colors=config.colors)
        return {"image": md.spec(image), "label": md.spec(image[:1], "int32")}

    return Model(
        name=name,
        init=partial(init, config),
        loss=partial(loss, config),
        batch_size=batch_size,
        length=length,
        batch_spec=batch_spec,
        config=config,
        rebuild=lambda config: resnet(name, config, batch_size, length),
    )
