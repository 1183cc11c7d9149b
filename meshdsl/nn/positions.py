"""Rotary position embeddings (Su et al. 2021, "RoFormer", section 3.4.2).

Feature i and feature i + n/2 of n are the two coordinates of a point, which is turned by the angle
position * base ** (-2i/n). The product of a query and a key turned so depends on the distance of
their positions only.
"""

from __future__ import annotations

import math

import meshdsl as md
from meshdsl.dims import Dimension, DimLike
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.operation import operation


class Rotation(md.Module):
    """The tables of a rotation: made once, used by all layers, for queries and keys.

    Attributes:
        cos, sin: [length, over], float32.
        partner: [over, partner], a signed permutation to the other coordinate of each point.
    """

    cos: md.Tensor
    sin: md.Tensor
    partner: md.Tensor
    over: str = md.static()

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns x turned; it has the dims `length` and `over` of the tables."""
        # A product with a permutation is exact, needs no slices, and runs on matrix units.
        there = md.einsum(x, md.cast(self.partner, x.dtype), over=self.over)
        there = there.rename(partner=self.over).transpose(x.shape)
        wide, partner = at_least_float32(x), at_least_float32(there)
        turned = wide * md.cast(self.cos, wide.dtype) + partner * md.cast(self.sin, wide.dtype)
        return md.cast(turned, x.dtype)


@operation
def rotation(length: Dimension, over: Dimension, base: float = 10000.0) -> Rotation:
    """Returns the tables that turn the features `over` by their position in `length`.

    Raises:
        ValueError: `over` has an odd size.
    """
    if over.size % 2:
        raise ValueError(f"features are turned in pairs, but `{over.name}` has size {over.size}")
    half = over.size // 2
    feature, partner = md.arange(over), md.arange(Dimension("partner", over.size))
    rate = md.exp(md.cast(feature % half, "float32") * (-math.log(base) / half))
    angle = md.cast(md.arange(length), "float32") * rate
    swap = md.cast(feature + half == partner, "float32") - md.cast(
        feature == partner + half, "float32"
    )
    return Rotation(md.cos(angle), md.sin(angle), swap, over.name)


@operation
def rotary(
    x: md.Tensor, length: DimLike = "length", over: DimLike = "kv", base: float = 10000.0
) -> md.Tensor:
    """Returns x with the pairs of `over` turned by their position in `length`.

    `nn.rotary(q)`, `nn.rotary(k, length="memory_length")`. Where several tensors or layers are
    turned alike, make the tables once with `nn.rotation`.

    Raises:
        ValueError: x lacks one of the dims, or `over` has an odd size.
    """
    return rotation(x.shape.get(length), x.shape.get(over), base)(x)
