"""Costs: how long operations of many sizes take on a kind of hardware, from a table.

A table is a file of `layouts/tables`, with its origin in it: for TPUs the compiler's own estimates,
in cycles (`meshdsl.lowering.backends.jax.sampling` makes them), for GPUs published measurements, in
nanoseconds (`tests/benchmarks/gpu_tables.py` makes them). What is kept of an operation is its
*efficiency*: the least time, by the peaks of the hardware, over the time in the table. Between the
sizes of the table the logarithm of the efficiency is interpolated along the logarithms of the
sizes. Beyond the largest size it stays as it is there. Below the smallest one the time stays: a
smaller operation is padded to it. `attention` alone gets shorter with fewer matrices and scores,
but never shorter than the shortest kernel of the table.

The families of a table, and the sizes of an operation in each:

* `products`, in bfloat16: rows, inner, columns.
* `elementwise`: the bytes moved to and from memory.
* `attention` and `attention_gradient`, fused kernels in bfloat16, causal: matrices of scores,
  length, features.
* `attention_blocks` and `attention_gradient_blocks`, one block of scores of such a kernel, while
  all cores of the device work: rows (and columns) of the block, features.
* `scores` and `scores_gradient`, one matrix of a block of scores without such a kernel, in bfloat16
  (`lowering.attention_sizes` has the blocks): rows (and columns) in the block, features.
* A collective by its kind, between the devices of one switch: devices, payload in bytes.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from meshdsl.layouts.hardware import Hardware, hardware, sent_bytes

_FOLDER = Path(__file__).resolve().parent / "tables"
_FORMAT = 2
PRODUCTS = "products"
ELEMENTWISE = "elementwise"
ATTENTION = "attention"
ATTENTION_BLOCKS = "attention_blocks"
SCORES = "scores"
GRADIENT = {
    ATTENTION: "attention_gradient",
    ATTENTION_BLOCKS: "attention_gradient_blocks",
    SCORES: "scores_gradient",
}
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")  # that NCCL names
CYCLES, NANOSECONDS = "cycles", "nanoseconds"
_BFLOAT16 = 2  # bytes: the dtype of the products in a table
_BLOCKS = (128, 256, 512)  # the sides of blocks of scores; a kernel takes the largest that divides

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """The efficiencies of one family of operations, by sizes."""

    efficiency: Mapping[Sizes, float]

    @cached_property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the table, for each of an operation's sizes."""
        return tuple(tuple(sorted(set(column))) for column in zip(*self.efficiency, strict=True))

    @cached_property
    def smallest(self) -> int:
        """The smallest size in the table."""
        return min(column[0] for column in self.axes)

    @cached_property
    def _known(self) -> dict[tuple[float, ...], float]:
        """The results of `at`: a step has the same sizes many times, and so have its variants."""
        return {}

    def at(self, sizes: Sequence[float]) -> float:
        """Returns the efficiency of an operation, interpolated."""
        key = tuple(sizes)
        if key not in self._known:
            self._known[key] = self._interpolated(key)
        return self._known[key]

    def _interpolated(self, sizes: tuple[float, ...]) -> float:
        corners = [_between(size, axis) for size, axis in zip(sizes, self.axes, strict=True)]
        total = weight_sum = 0.0
        for corner in itertools.product(*corners):
            weight = math.prod(share for _, share in corner)
            known = self.efficiency.get(tuple(size for size, _ in corner))
            if weight and known is not None:
                total += weight * math.log(known)
                weight_sum += weight
        if not weight_sum:  # the table has none of the corners: the nearest entry
            return self.efficiency[min(self.efficiency, key=lambda known: _distance(known, sizes))]
        return math.exp(total / weight_sum)


@dataclass(frozen=True)
class Costs:
    """What operations cost on a kind of hardware: `costs_of("v5p").product(512, 4096, 4096)`.

    Attributes:
        origin: where the figures come from.
    """

    hardware: Hardware
    origin: str
    families: Mapping[str, Family]

    def on(self, hardware: Hardware) -> Costs:
        """Returns the same efficiencies for hardware with other peaks."""
        return replace(self, hardware=hardware)

    def product(
        self, rows: int, inner: int, columns: int, width: int = _BFLOAT16, batch: float = 1
    ) -> float:
        """Returns the seconds of [rows, inner] x [inner, columns].

        Args:
            width: bytes of an element of the operands and of the result.
            batch: how many such products are one operation.
        """
        family = self.families[PRODUCTS]
        smallest = family.smallest
        sizes = [max(size, smallest) for size in (rows, inner, columns)]
        least = _least_of_product(self.hardware, sizes, width)
        alone = least / family.at(sizes)
        if batch == 1:
            return alone
        # What even the smallest product costs, it costs once.
        start = [smallest] * 3
        once = _least_of_product(self.hardware, start, width) / family.at(start)
        return once + batch * max(alone - once, least)

    def moved(self, family: str, moved_bytes: float) -> float:
        """Returns the seconds of work of a family that moves some bytes to and from memory."""
        table = self.families[family]
        count = max(moved_bytes, table.axes[0][0])
        return count / self.hardware.memory_bandwidth / table.at([count])

    def attention(
        self,
        matrices: int,
        rows: int,
        columns: int,
        features: int,
        *,
        causal: bool = False,
        window: int | None = None,
        gradient: bool = False,
    ) -> float | None:
        """Returns the seconds of a fused kernel of attention; None: there is none for these sizes.

        Blocks of scores that are all hidden cost nothing.

        Args:
            matrices: how many matrices of scores, [rows, columns], there are.
            gradient: whether it is the kernel of the gradients, rather than that of the result.
        """
        if ATTENTION in self.families:
            shown = visible_scores(rows, columns, 1, 1, causal, window)
            least = matrices * _least_of_scores(self.hardware, shown, features, gradient)
            efficiency = self._of_kernel([matrices, math.sqrt(rows * columns), features], gradient)
            return max(least / efficiency, self._shortest_kernel)
        blocks = [max((b for b in _BLOCKS if size % b == 0), default=0) for size in (rows, columns)]
        if ATTENTION_BLOCKS not in self.families or not all(blocks):
            return None
        family = self.families[GRADIENT[ATTENTION_BLOCKS] if gradient else ATTENTION_BLOCKS]
        shown = visible_scores(rows, columns, *blocks, causal, window)
        features = max(features, family.axes[1][0])
        least = _least_of_scores(self.hardware, shown, features, gradient)
        return matrices * least / family.at([math.sqrt(math.prod(blocks)), features])

    def scores(
        self,
        shown: int,
        rows: int,
        columns: int,
        features: int,
        *,
        gradient: bool = False,
        least: bool = False,
    ) -> float | None:
        """Returns the seconds of attention in blocks, without a fused kernel.

        None: there is no table, or it has no blocks with so few rows or columns.

        Args:
            shown: how many scores there are in all blocks that are computed.
            rows, columns: those of one block.
            gradient: whether these are the gradients, rather than the result.
            least: whether to take the fastest blocks of the table instead.
        """
        family = self.families.get(GRADIENT[SCORES] if gradient else SCORES)
        if family is None or min(rows, columns) < family.axes[0][0]:
            return None
        features = max(features, family.axes[1][0])
        sides = family.axes[0] if least else [math.sqrt(rows * columns)]
        efficiency = max(family.at([side, features]) for side in sides)
        return _least_of_scores(self.hardware, shown, features, gradient) / efficiency

    def _of_kernel(self, sizes: Sequence[float], gradient: bool) -> float:
        """Returns the efficiency of a fused kernel of attention.

        Gradients were measured for fewer sizes than the forward pass. Beyond these, the efficiency
        of the gradients changes as that of the forward pass does.

        Args:
            sizes: matrices, length and features.
        """
        forward = self.families[ATTENTION]
        if not gradient:
            return forward.at(sizes)
        backward = self.families[GRADIENT[ATTENTION]]
        nearest = [
            min(max(size, known[0]), known[-1])
            for size, known in zip(sizes, backward.axes, strict=True)
        ]
        return backward.at(nearest) * forward.at(sizes) / forward.at(nearest)

    @cached_property
    def _shortest_kernel(self) -> float:
        """The seconds of the shortest kernel of attention in the table; none takes less."""
        rows = self.families[ATTENTION].efficiency.items()
        return min(_least(self.hardware, ATTENTION, sizes) / share for sizes, share in rows)

    def collective(self, kind: str, devices: int, payload: float) -> float | None:
        """Returns the seconds of a collective on one switch; None: there is no table of its kind.

        Args:
            devices: how many devices take part.
            payload: bytes of the larger of the local operand and result.
        """
        family = self.families.get(kind)
        if family is None:
            return None
        size = max(payload, family.axes[1][0])
        sent = sent_bytes(kind, devices, size)
        return sent / self.hardware.link_bandwidth / family.at([devices, size])


@cache
def visible_scores(
    rows: int, columns: int, high: int, wide: int, causal: bool = False, window: int | None = None
) -> int:
    """Returns the scores of a matrix, with pads, in the blocks that are not all hidden.

    >>> visible_scores(1024, 1000, 256, 512, causal=True)
    786432

    Args:
        high, wide: the rows and columns of a block.
        window: scores at least that far before the diagonal are hidden, and as far behind it.
    """
    blocks = 0
    for start in range(0, rows, high):
        end = start + high  # pads see columns, too
        first = 0 if window is None else max(0, (start - window + 1) // wide)
        last = columns - 1 if not causal else end - 1
        if window is not None and not causal:
            last = end + window - 2
        blocks += max(0, min(last, columns - 1) // wide + 1 - first)
    return blocks * high * wide


def costs_of(name: str) -> Costs | None:
    """Returns the costs of a kind of hardware; None: there is no table of it."""
    return _read(name) if path_of(name).is_file() else None


def path_of(name: str) -> Path:
    """Returns the file of a table."""
    return _FOLDER / f"{name}.json"


def to_json(
    name: str, origin: str, families: Mapping[str, Sequence[Sequence[int]]], unit: str = CYCLES
) -> str:
    """Returns a table as text, one operation in a line: its sizes, and its time."""
    head = {"format": _FORMAT, "hardware": name, "origin": origin, "unit": unit}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines.append('  "families": {')
    for at, (family, rows) in enumerate(families.items()):
        lines.append(f"    {json.dumps(family)}: [")
        lines.append(",\n".join(f"      {json.dumps(list(row))}" for row in rows))
        lines.append("    ]" + ("," if at < len(families) - 1 else ""))
    return "\n".join(["{", *lines, "  }", "}", ""])


@cache
def _read(name: str) -> Costs:
    table = json.loads(path_of(name).read_text(encoding="utf-8"))
    if table["format"] != _FORMAT:
        raise ValueError(f"{path_of(name)}: format {table['format']}, this version reads {_FORMAT}")
    kind = hardware(name)
    second = kind.clock if table["unit"] == CYCLES else 1e9
    families = {
        family: Family(
            {tuple(sizes): _least(kind, family, sizes) / (time / second) for *sizes, time in rows}
        )
        for family, rows in table["families"].items()
    }
    return Costs(kind, table["origin"], families)


def _least(kind: Hardware, family: str, sizes: Sequence[int]) -> float:
    """Returns the seconds of an operation of a family by the peaks of the hardware."""
    if family == PRODUCTS:
        return _least_of_product(kind, sizes, _BFLOAT16)
    if family in COLLECTIVES:
        return sent_bytes(family, *sizes) / kind.link_bandwidth
    gradient = family in GRADIENT.values()
    if family in (ATTENTION, GRADIENT[ATTENTION]):
        matrices, length, features = sizes
        shown = visible_scores(length, length, 1, 1, causal=True)
        return matrices * _least_of_scores(kind, shown, features, gradient)
    if family in (ATTENTION_BLOCKS, GRADIENT[ATTENTION_BLOCKS], SCORES, GRADIENT[SCORES]):
        side, features = sizes
        return _least_of_scores(kind, side * side, features, gradient)
    return sizes[0] / kind.memory_bandwidth


def _least_of_product(kind: Hardware, sizes: Sequence[int], width: int) -> float:
    """Returns the seconds of a product by the peaks of the hardware.

    Args:
        sizes: rows, inner and columns.
    """
    rows, inner, columns = sizes
    moved = width * (rows * inner + inner * columns + rows * columns)
    flops = kind.flops[min(kind.flops, key=lambda known: abs(known - width))]
    return max(2 * rows * inner * columns / flops, moved / kind.memory_bandwidth)


def _least_of_scores(kind: Hardware, scores: int, features: int, gradient: bool) -> float:
    """Returns the seconds of the products of scores: two, or five for the gradients."""
    return 2 * (5 if gradient else 2) * scores * features / kind.flops[_BFLOAT16]


def _between(size: float, known: Sequence[int]) -> list[tuple[int, float]]:
    """Returns the sizes of a table around a size, with their weights."""
    if size <= known[0]:
        return [(known[0], 1.0)]
    if size >= known[-1]:
        return [(known[-1], 1.0)]
    above = bisect.bisect_left(known, size)
    low, high = known[above - 1], known[above]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


def _distance(known: Sizes, sizes: Sequence[float]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(known, sizes, strict=True))
