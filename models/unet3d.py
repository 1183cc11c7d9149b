"""A 3-D U-Net that labels every voxel (Çiçek et al. 2016, "3D U-Net").

Its dims `depth`, `height` and `width` can be split like any others: convolutions then exchange one
layer of voxels with their neighbours, and pooling and transposed convolutions nothing, as long as
the sizes divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import values_out_of_range
from meshdsl.models.layers.convolution import Convolution, NormKind, Statistics, init_convolution
from meshdsl.models.layers.drawing import Drawing
from meshdsl.models.model import Model
from meshdsl.tensors.named_array import Spec

SPACE = ("depth", "height", "width")


@dataclass(frozen=True)
class UNet3DConfig:
    """Sizes and kinds of the parts of a 3-D U-Net.

    Attributes:
        filters: of the first convolution; each level below has twice as many.
        levels: how many resolutions there are; each halves that of the one above.
        modalities: numbers per voxel.
        classes: of a voxel.
        norm: "group" of `groups` groups, "batch" (by the statistics of each batch), or "none".
        policy: the dtypes of parameters, computation, and scores.

    Raises:
        ValueError: sizes that are too small, or unknown kinds; all told.
    """

    filters: int = 32
    levels: int = 4
    modalities: int = 1
    classes: int = 3
    norm: NormKind = "group"
    groups: int = 8
    policy: md.Policy = field(default_factory=md.Policy)

    def __post_init__(self) -> None:
        problems = values_out_of_range(self)
        if problems:
            raise ValueError("; ".join(problems))


class Level(md.Module):
    """Two convolutions at one resolution, on either way."""

    first: Convolution
    second: Convolution

    def __call__(self, x: md.Tensor, statistics: Statistics) -> md.Tensor:
        return md.relu(self.second(md.relu(self.first(x, statistics)), statistics))


class UNet3D(md.Module):
    """All parameters; lists go from the finest resolution to the coarsest."""

    down: list[Level]
    up: list[Convolution]
    merged: list[Level]
    out: Convolution


def init(config: UNet3DConfig, key: md.Tensor) -> UNet3D:
    """Returns initial parameters."""
    draw = Drawing(key, 5 * config.levels, config.policy.params)
    convolution = partial(init_convolution, draw, SPACE, norm=config.norm, groups=config.groups)
    sizes = [config.filters * 2**level for level in range(config.levels)]
    before = [config.modalities, *sizes]
    pairs = list(pairwise(sizes))
    return UNet3D(
        down=[
            Level(convolution((given, made), 3), convolution((made, made), 3))
            for given, made in zip(before, sizes, strict=False)
        ],
        up=[
            init_convolution(draw, SPACE, (coarse, fine), 2, stride=2, transposed=True)
            for fine, coarse in pairs
        ],
        merged=[
            Level(convolution((2 * fine, fine), 3), convolution((fine, fine), 3))
            for fine, _ in pairs
        ],
        out=init_convolution(draw, SPACE, (config.filters, config.classes), 1),
    )


def logits(config: UNet3DConfig, params: UNet3D, volumes: md.Tensor) -> md.Tensor:
    """Returns the scores of the classes: [batch, depth, height, width, classes].

    Args:
        volumes: [batch, depth, height, width, modalities].

    Raises:
        ValueError: a size that cannot be halved from level to level.
    """
    _check_sizes(config, volumes)
    params, x = config.policy.to_compute((params, volumes.rename(modalities="channels")))
    used = Statistics()
    passed = []
    for level in params.down[:-1]:
        x = level(x, used)
        passed.append(x)
        x = md.max_pool(x, dict.fromkeys(SPACE, 2))
    x = params.down[-1](x, used)
    for above, up, merged in reversed(list(zip(passed, params.up, params.merged, strict=True))):
        x = merged(md.concat([above, up(x, used)], "channels"), used)
    return config.policy.to_output(params.out(x, used)).rename(channels="classes")


def _check_sizes(config: UNet3DConfig, volumes: md.Tensor) -> None:
    factor = 2 ** (config.levels - 1)
    uneven = [str(volumes.shape.get(d)) for d in SPACE if volumes.shape.get(d).size % factor]
    if uneven:
        raise ValueError(
            f"{', '.join(uneven)}: with levels={config.levels}, each needs to be a multiple of "
            f"{factor}"
        )


def loss(config: UNet3DConfig, params: UNet3D, batch: Mapping[str, Any]) -> md.Tensor:
    """Returns the mean negative log-likelihood of the voxels' labels, in nats."""
    scores = logits(config, params, batch["volume"])
    return md.mean(nn.softmax_cross_entropy(scores, batch["label"], over="classes"))


def unet3d(name: str, config: UNet3DConfig, batch_size: int, length: int) -> Model:
    """Returns the model of a configuration; `length` is the size of its volumes each way."""

    def batch_spec(batch_size: int, length: int) -> dict[str, Spec]:
        space = md.dims(batch=batch_size, depth=length, height=length, width=length)
        volume = [*space, md.Dimension("modalities", config.modalities)]
        return {"volume": md.spec(volume), "label": md.spec(space, "int32")}

    return Model(
        name=name,
        init=partial(init, config),
        loss=partial(loss, config),
        batch_size=batch_size,
        length=length,
        batch_spec=batch_spec,
        config=config,
        rebuild=lambda config: unet3d(name, config, batch_size, length),
    )
