"""Norms of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers.drawing import Drawing
from meshdsl.tensors.dims import Dimension


class Norm(md.Module):
    """RMS norm, or with `centred`, layer norm, over the last dim of `scale`."""

    scale: md.Tensor  # embed
    bias: md.Tensor | None  # embed
    over: str = md.static()
    centred: bool = md.static()
    eps: float = md.static()
    offset: float = md.static()  # added to the scale

    def __call__(self, x: md.Tensor) -> md.Tensor:
        scale = self.scale + self.offset if self.offset else self.scale
        if self.centred:
            return nn.layer_norm(x, self.over, scale, self.bias, self.eps)
        return nn.rms_norm(x, self.over, scale, self.eps)


def init_norm(config: TransformerConfig, draw: Drawing, dims: Sequence[Dimension]) -> Norm:
    """Returns the norm over the last of `dims`, which begins as doing nothing more."""
    centred = config.norm == "layer"
    bias = draw.zeros(dims) if centred and config.bias else None
    offset = config.norm_unit_offset
    scale = draw.zeros(dims) if offset else draw.ones(dims)
    return Norm(scale, bias, dims[-1].name, centred, config.eps, float(offset))
