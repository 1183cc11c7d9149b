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

import numpy as np

import meshdsl as md
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.literal import literal
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike


class Rotation(md.Module):
    """The tables of a rotation: computed once, used by all layers, for queries and keys.

    Attributes:
        cos, sin: [length, over], float32; the sine is negative for the first coordinates. With
            positions of their own, texts have their dims too.

    Examples:
        >>> length, kv = md.dims(length=8, kv=4)
        >>> rotate = md.nn.rotation(length, kv)
        >>> print(rotate.cos.dims, rotate.sin.dims, rotate.over)
        [length=8, kv=4] [length=8, kv=4] kv
        >>> q = md.ones([md.Dimension("heads", 2), length, kv])
        >>> print(rotate(q).dims)
        [heads=2, length=8, kv=4]
    """

    cos: md.Tensor
    sin: md.Tensor
    over: str = md.static()

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns x rotated; it has the dims `length` and `over` of the tables."""
        half = x.shape.get(self.over).size // 2
        wide = at_least_float32(x)
        other_half = at_least_float32(md.shift(x, self.over, half, True))
        cos, sin = md.cast(self.cos, wide.dtype), md.cast(self.sin, wide.dtype)
        rotated = wide * cos + other_half * sin
        return md.cast(rotated, x.dtype)


@dataclass(frozen=True)
class RotaryScaling:
    """Slower rotations, so that a model reads longer texts than it was first trained on.

    Attributes:
        kind: "linear" divides all rates by `factor` (Chen et al. 2023, "Extending context window").
            "dynamic" takes a larger base in texts of more than `original` positions, so that the
            slowest features turn no further than there (Peng et al. 2023, "YaRN", appendix B.1).
            "llama3" divides the rates of features that turn fewer than `low` times in `original`
            positions, keeps those of more than `high` turns, and blends those between (Grattafiori
            et al. 2024, "The Llama 3 herd of models", section 3.4.2, and its reference code).
            "yarn" does so, too, but blends evenly from feature to feature (Peng et al. 2023,
            section 3.2, and its reference code, which rounds to whole features).
            "longrope" divides the rate of each pair of features by one of `short` in texts of up to
            `original` positions, else of `long` (Ding et al. 2024, "LongRoPE").
        original: the length of the first training; "linear" does not need it.
        magnitude: what cosine and sine are multiplied by. None: "yarn" and "longrope" sharpen
            scores for longer texts as their papers say, the others do not.

    Examples:
        >>> length, kv = md.dims(length=3, kv=2)
        >>> half = md.nn.RotaryScaling("linear", 2.0)  # positions count half
        >>> tables = md.nn.rotation(length, kv, scaling=half)
        >>> unscaled = md.nn.rotation(md.Dimension("length", 2), kv)
        >>> np.allclose(tables.cos.data[2], unscaled.cos.data[1])
        True
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    magnitude: float | None = None

    @property
    def size(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.magnitude is not None:
            return self.magnitude
        if self.kind == "yarn":  # Peng et al. 2023, equation 22
            return 0.1 * math.log(self.factor) + 1
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original))
        return 1.0

    def rates(self, over: Dimension, base: float, reach: int) -> md.Tensor:
        """Returns the scaled rates [over], in radians per position, for texts of `reach` positions.

        Raises:
            ValueError: `short` or `long` have not one number for each pair of features.
        """
        if self.kind == "dynamic":
            beyond = self.factor * max(reach, self.original) / self.original - (self.factor - 1)
            return _rates(over, base * beyond ** (over.size / (over.size - 2)))
        rate = _rates(over, base)
        if self.kind == "longrope":
            divisors = self.short if reach <= self.original else self.long
            if len(divisors) != over.size // 2:
                raise ValueError(
                    f"longrope: {len(divisors)} divisors for {over.size // 2} pairs of features "
                    f"`{over.name}`; give one for each"
                )
            return rate / literal(md.named(np.array(divisors * 2, "float32"), [over.name]))
        slow = rate / self.factor
        if self.kind == "linear":
            return slow
        if self.kind == "yarn":
            return slow + self._kept(over, base) * (rate - slow)
        turns = rate * (self.original / (2 * math.pi))
        share = md.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return slow + share * (rate - slow)

    def _kept(self, over: Dimension, base: float) -> md.Tensor:
        """Returns which share of its rate a feature keeps by "yarn", [over]."""

        def pair(turns: float) -> float:  # that turns so often in the original positions
            positions = self.original / (turns * 2 * math.pi)
            return over.size * math.log(positions) / (2 * math.log(base))

        first = max(math.floor(pair(self.high)), 0)
        last = float(min(math.ceil(pair(self.low)), over.size - 1))
        last += 0.001 if last == first else 0.0  # as the reference code does
        number = md.cast(md.arange(over) % (over.size // 2), "float32")
        return 1 - md.clip((number - first) / (last - first), 0.0, 1.0)


@operation
def rotation(
    length: Dimension,
    over: Dimension,
    base: float = 10000.0,
    positions: md.Tensor | None = None,
    scaling: RotaryScaling | None = None,
    reach: int | None = None,
) -> Rotation:
    """Returns the tables that rotate the features `over` by their position in `length`.

    Args:
        positions: integers [..., length]; by default 0, 1, ...
        scaling: changes the rates of rotation; None: they stay as they are.
        reach: how many positions a text has room for, which some scalings depend on; by default as
            many as `length`.

    Raises:
        ValueError: `over` has an odd size, or `scaling` is for another number of features.

    Examples:
        >>> length, kv = md.dims(length=8, kv=4)
        >>> rotate = md.nn.rotation(length, kv)
        >>> q = md.ones([length, md.Dimension("heads", 2), kv])
        >>> np.allclose(rotate(q), md.nn.rotary(q))
        True
    """
    if over.size % 2:
        raise ValueError(f"features are turned in pairs, but `{over.name}` has size {over.size}")
    half = over.size // 2
    size = 1.0 if scaling is None else scaling.size
    if scaling is None:
        rate = _rates(over, base)
    else:
        rate = scaling.rates(over, base, length.size if reach is None else reach)
    if positions is None:
        positions = md.arange(length)
    angle = md.outer(md.multiply, md.cast(positions, "float32"), rate)
    cos, sin = md.cos(angle), md.where(md.arange(over) < half, -1.0, 1.0) * md.sin(angle)
    return (
        Rotation(cos, sin, over.name) if size == 1 else Rotation(size * cos, size * sin, over.name)
    )


def _rates(over: Dimension, base: float) -> md.Tensor:
    """Returns how fast features turn, [over], in radians per position."""
    half = over.size // 2
    return md.exp(md.cast(md.arange(over) % half, "float32") * (-math.log(base) / half))


@operation
def rotary(
    x: md.Tensor, length: DimLike = "length", over: DimLike = "kv", base: float = 10000.0
) -> md.Tensor:
    """Returns x with the pairs of `over` rotated by their position in `length`.

    `nn.rotary(q)`, `nn.rotary(k, length="memory_length")`. Where several tensors or layers are
    rotated alike, make the tables once with `nn.rotation`.

    Raises:
        ValueError: x lacks one of the dims, or `over` has an odd size.

    Examples:
        >>> q = md.named([[1.0, 0.0], [1.0, 0.0]], ["length", "kv"])
        >>> turned = [[1.0, 0.0], [np.cos(1.0), np.sin(1.0)]]  # one radian per position
        >>> np.allclose(md.nn.rotary(q), turned)
        True
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

    Examples:
        >>> length, memory = md.dims(length=2, memory_length=3)
        >>> table = md.named([0.0, 1.0, 2.0, 3.0], ["buckets"])
        >>> print(md.nn.relative_bias(table, length, memory, causal=True))
        f32[length=2, memory_length=3] [[0. 0. 0.]
         [1. 0. 0.]]
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

    Examples:
        >>> heads, length, memory = md.dims(heads=1, length=2, memory_length=3)
        >>> print(-256.0 * md.nn.alibi_bias([heads], length, memory))  # the slope is 1 / 256
        f32[heads=1, length=2, memory_length=3] [[[0. 1. 2.]
          [1. 0. 1.]]]
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
