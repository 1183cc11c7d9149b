"""Where parameters stand in tensors: names, merged dims, transposes, several in one tensor.

`Part("h.{layers}.attn.c_proj.weight", "heads kv, embed")` says: each layer has a tensor of two
axes; the first is made of `heads` and `kv`, `heads` major. A dim that a parameter lacks has
size 1. Of `heads *kv|rotary_kv` each head has `kv` and then `rotary_kv`, and the parameter is the
first of them. `rotary_kv~` is stored by pairs: features i and i + n/2 of n stand side by side.
Blocks of parameters are found without reading more than they need, but for merged dims of which an
inner one is split, is one of several, or is stored by pairs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshdsl.tensors.named_array import Spec

_DIM = re.compile(r"\{(\w+)\}")
Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Where a parameter is.

    Attributes:
        name: of the tensor; `{layers}` stands for the number of a layer, `{experts}` of an expert.
        axes: of the tensor, with the dims that each is made of: "heads group kv, embed".
        after: of several parameters in one tensor, what stands before this one, along the first
            axis that is of other dims than theirs: the dims of each.
        first: the number of the first of the layers.
    """

    name: str
    axes: str
    after: tuple[str, ...] = ()
    along: int = 0
    first: int = 0

    @property
    def counted(self) -> tuple[str, ...]:
        """The dims that count tensors: layers, experts."""
        return tuple(_DIM.findall(self.name))

    @property
    def merged(self) -> list[list[Run]]:
        """What each axis is made of."""
        return [[Run(text) for text in axis.split()] for axis in self.axes.split(",")]


class Run:
    """A dim in a merged axis: `kv`, or one of several `*kv|rotary_kv`; `kv~` is stored by pairs."""

    def __init__(self, text: str) -> None:
        several = text.split("|")
        own = next((at for at, one in enumerate(several) if one.startswith("*")), 0)
        dims = [one.strip("*~") for one in several]
        self.dim, self.paired = dims[own], several[own].endswith("~")
        self.before, self.others = dims[:own], dims[:own] + dims[own + 1 :]

    def positions(self, size: int, start: int, low: int, high: int) -> slice | np.ndarray:
        """Returns where the positions of the dim are stored, from `low` to `high`."""
        if not self.paired:
            return slice(start + low, start + high)
        at = np.arange(low, high)
        return start + 2 * (at % (size // 2)) + at // (size // 2)


@dataclass(frozen=True)
class Piece:
    """A tensor's block that is a block of a parameter, after `arranged`.

    Attributes:
        name: of the tensor.
        index: the block, from a start to a stop along each axis.
        at: where it belongs in the block of the parameter: numbers of counted dims, by axis.
        split, inner, order: how `arranged` makes one of the other.
    """

    name: str
    index: tuple[Range, ...]
    at: tuple[int | slice, ...]
    split: tuple[int, ...]
    inner: tuple[slice | np.ndarray, ...]
    order: tuple[int, ...]

    def arranged(self, block: np.ndarray) -> np.ndarray:
        """Returns the tensor's block with the parameter's dims, without those it counts."""
        return block.reshape(self.split)[self.inner].transpose(self.order)

    def written(self, into: np.ndarray, block: np.ndarray) -> None:
        """Writes the parameter's block into a tensor; the block has all of the merged dims."""
        stored = into[tuple(slice(*each) for each in self.index)].reshape(self.split)
        assert np.shares_memory(stored, into) or not block.size  # axes are split, so it is a view
        stored[self.inner] = block.transpose(np.argsort(self.order))


@dataclass(frozen=True)
class Table:
    """The parts of a model's parameters: `Table(family.parts, by_path(specs))`.

    Attributes:
        parts: by path; those of parameters that the model lacks do not count.
        specs: the dims and dtypes of the parameters, by path.
    """

    parts: Mapping[str, Part]
    specs: Mapping[str, Spec]

    @property
    def unknown(self) -> list[str]:
        """The paths of parameters that have no part."""
        return [path for path in self.specs if path not in self.parts]

    @property
    def _sizes(self) -> dict[str, int]:
        return {dim.name: dim.size for spec in self.specs.values() for dim in spec.dims}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor by name, in the order of the parameters."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.specs:
            for piece in self.pieces(path):
                shape = tuple(stop for _, stop in piece.index)
                known = shapes.get(piece.name, shape)
                shapes[piece.name] = tuple(map(max, shape, known))
        return shapes

    def sources(self) -> dict[str, list[str]]:
        """Returns the paths of the parameters in every tensor, by its name."""
        found: dict[str, list[str]] = {}
        for path in self.specs:
            for piece in self.pieces(path):
                found.setdefault(piece.name, []).append(path)
        return found

    def pieces(self, path: str, block: Sequence[Range] | None = None) -> Iterator[Piece]:
        """Yields the tensors' blocks that make a block of a parameter, by default all of it."""
        part, dims = self.parts[path], self.specs[path].dims
        ranges = dict(zip(dims.names, block or [(0, d.size) for d in dims], strict=True))
        sizes = {dim.name: dim.size for dim in dims}
        counted = [dim for dim in dims.names if dim in part.counted]
        rest = [dim for dim in dims.names if dim not in counted]
        merged = [[run for run in axis if run.dim in sizes] for axis in part.merged]
        flat = [run.dim for axis in merged for run in axis]
        assert sorted(flat) == sorted(rest), f"{path}{dims}: {part}"
        index, split, inner = [], list[int](), list[slice | np.ndarray]()
        for axis in merged:
            where, shape, within = _axis(axis, sizes, ranges, self._sizes)
            index.append(where)
            split += shape
            inner += within
        before = sum(self._size_of(each) for each in part.after)
        start, stop = index[part.along]
        index[part.along] = (start + before, stop + before)
        order = tuple(flat.index(dim) for dim in rest)
        for numbers in itertools.product(*(range(*ranges[dim]) for dim in counted)):
            of = dict(zip(counted, numbers, strict=True))
            at = tuple(of[dim] - ranges[dim][0] if dim in of else slice(None) for dim in dims.names)
            number = {dim: at + part.first * (dim == "layers") for dim, at in of.items()}
            yield Piece(
                part.name.format(**number), tuple(index), at, tuple(split), tuple(inner), order
            )

    def _size_of(self, dims: str) -> int:
        return math.prod(self._sizes.get(dim, 1) for dim in dims.split())


def _axis(
    runs: Sequence[Run],
    sizes: Mapping[str, int],
    ranges: Mapping[str, Range],
    others: Mapping[str, int],
) -> tuple[Range, list[int], list[slice | np.ndarray]]:
    """Returns the range of a merged axis that has a block, its shape by dims, and the block there.

    The range is exact if no dim after the first of several positions is split, is one of several or
    is stored by pairs.
    """
    every = [sizes[run.dim] + sum(others[dim] for dim in run.others) for run in runs]
    start, stride = 0, math.prod(every)
    shape, inner = list[int](), list[slice | np.ndarray]()
    length, exact = stride, True
    for run, full in zip(runs, every, strict=True):
        low, high = ranges[run.dim]
        before = sum(others[dim] for dim in run.before)
        if exact and not run.paired:
            stride //= full
            start += (before + low) * stride
            length = (high - low) * stride
            shape.append(high - low)
            inner.append(slice(None))
            exact = high - low == 1
        else:
            shape.append(full)
            inner.append(run.positions(sizes[run.dim], before, low, high))
            exact = False
    return (start, start + length), shape, inner
