"""Positions: rotary embeddings of queries and keys, and biases on scores by distance.

Rotary embeddings (Su et al. 2021, "RoFormer", section 3.4.2): feature i and feature i + n/2 of n
are the two coordinates of a point, which is rotated by the angle position * base ** (-2i/n). The
product of a rotated query and a rotated key depends only on the distance of their positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import meshdsl as md
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike


class Rotation(md.Module):
    """The tables of a rotation: computed once, used by all layers, for queries and keys.

    Attributes:
        cos, sin: [length, over], float32; the sine is negative for the first coordinates. With
            positions of their own, texts have their dims too.
    """

    cos: md.Tensor
    sin: md.Tensor
    over: str = md.static()

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns x rotated; it has the dims `length` and `over` of the tables."""
        half = x.shape.get(self.over).size // 2
        wide, partner = at_least_float32(x), at_least_float32(md.shift(x, self.over, half, True))
        turned = wide * md.cast(self.cos, wide.dtype) + partner * md.cast(self.sin, wide.dtype)
        return md.cast(turned, x.dtype)


@dataclass(frozen=True)
class RotaryScaling:
    """Slower rotations, so that a model reads longer texts than it was first trained on.

    Attributes:
        kind: "linear" divides all rates by `factor` (Chen et al. 2023, "Extending context window").
            "llama3" divides the rates of features that turn fewer than `low` times in `original`
            positions, keeps those of more than `high` turns, and blends those between (Grattafiori
            et al. 2024, "The Llama 3 herd of models", section 3.4.2, and its reference code).
        original: the length of the first training; "linear" does not need it.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __call__(self, rate: md.Tensor) -> md.Tensor:
        """Returns the scaled rates, in radians per position."""
        slow = rate / self.factor
        if self.kind == "linear":
            return slow
        turns = rate * (self.original / (2 * math.pi))
        share = md.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return slow + share * (rate - slow)


@operation
def rotation(
    length: Dimension,
    over: Dimension,
    base: float = 10000.0,
    positions: md.Tensor | None = None,
    scaling: RotaryScaling | None = None,
) -> Rotation:
    """Returns the tables that rotate the features `over` by their position in `length`.

    Args:
        positions: integers [..., length]; by default 0, 1, ...
        scaling: changes the rates of rotation; None: they stay as they are.

    Raises:
        ValueError: `over` has an odd size.
    """
    if over.size % 2:
        raise ValueError(f"features are turned in pairs, but `{over.name}` has size {over.size}")
    half = over.size // 2
    feature = md.arange(over)
    rate = md.exp(md.cast(feature % half, "float32") * (-math.log(base) / half))
    if scaling is not None:
        rate = scaling(rate)
    if positions is None:
        positions = md.arange(length)
    angle = md.outer(md.multiply, md.cast(positions, "float32"), rate)
    return Rotation(md.cos(angle), md.where(feature < half, -1.0, 1.0) * md.sin(angle), over.name)


@operation
def rotary(
    x: md.Tensor, length: DimLike = "length", over: DimLike = "kv", base: float = 10000.0
) -> md.Tensor:
    """Returns x with the pairs of `over` rotated by their position in `length`.

    `nn.rotary(q)`, `nn.rotary(k, length="memory_length")`. Where several tensors or layers are
    rotated alike, make the tables once with `nn.rotation`.

    Raises:
        ValueError: x lacks one of the dims, or `over` has an odd size.
    """
    return rotation(x.shape.get(length), x.shape.get(over), base)(x)


@operation
def relative_bias(
    table: md.Tensor,
    length: Dimension,
    memory: Dimension,
    causal: bool = False,
    max_distance: int = 128,
    buckets: DimLike = "buckets",
    positions: md.Tensor | None = None,
    memory_positions: md.Tensor | None = None,
) -> md.Tensor:
    """Returns a bias on scores, learned per bucket of distances (Raffel et al. 2020, section 2.1).

    `nn.relative_bias(table, length, memory_length)`. Half of the buckets are for one distance each.
    The other half are for ever wider ranges up to `max_distance`, and for all distances beyond.
    Unless `causal`, half of either are for later positions.

    Args:
        table: [buckets, ...].
        length: the dim of the positions that attend.
        memory: the dim of the positions attended to.
        positions, memory_positions: integers [length] and [memory]; by default 0, 1, ...

    Returns:
        [length, memory, ...].
    """
    count = table.shape.get(buckets).size
    behind = _behind(length, memory, positions, memory_positions)
    if causal:
        distance = md.maximum(behind, 0)
    else:
        count //= 2
        distance = md.abs(behind)
    single = count // 2
    wide = md.cast(md.maximum(distance, 1), "float32")
    ratio = md.log(wide / single) * ((count - single) / math.log(max_distance / single))
    far = md.minimum(single + md.cast(ratio, "int32"), count - 1)
    bucket = md.where(distance < single, distance, far)
    if not causal:
        bucket = bucket + md.where(behind < 0, count, 0)
    return md.take(table, bucket, buckets)


@operation
def alibi_bias(
    heads: Sequence[Dimension],
    length: Dimension,
    memory: Dimension,
    positions: md.Tensor | None = None,
    memory_positions: md.Tensor | None = None,
) -> md.Tensor:
    """Returns -slope * distance: [*heads, length, memory] (Press et al. 2022, section 3).

    `nn.alibi_bias([heads], length, memory_length)`. Of n heads, head i has slope 2 ** (-8 (i+1)/n).
    Positions are as in `relative_bias`.
    """
    number, count = md.zeros([]), math.prod(dim.size for dim in heads)
    for dim in heads:
        number = md.outer(md.add, number * dim.size, md.cast(md.arange(dim), "float32"))
    slope = md.exp((number + 1) * (-8 * math.log(2) / count))
    behind = _behind(length, memory, positions, memory_positions)
    distance = md.cast(md.abs(behind), "float32")
    return md.broadcast(md.outer(md.multiply, -slope, distance), [*heads, length, memory])


def _behind(
    length: Dimension,
    memory: Dimension,
    positions: md.Tensor | None,
    memory_positions: md.Tensor | None,
) -> md.Tensor:
    """Returns how far each position of the memory is behind those that attend."""
    here = md.arange(length) if positions is None else positions
    there = md.arange(memory) if memory_positions is None else memory_positions
    return md.outer(md.subtract, here, there)
