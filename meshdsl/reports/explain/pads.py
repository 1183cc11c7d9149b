"""Pads: what is lost where a size does not divide by the devices that share it.

Along a split dim every device has the same number of positions, so the last devices have pads. The
share of pads of a tensor is 1 minus its elements over those of all its shards together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.memory import Buffer
from meshdsl.lowering.program import Block, SpmdProgram, Value
from meshdsl.tensors.dims import Dimension


@dataclass(frozen=True, slots=True)
class PaddedDim:
    """A dim that does not divide by the axes it is split over: `blocks` of `block` positions.

    Attributes:
        tensors: how many values of the program have this padding.
    """

    dim: Dimension
    axes: tuple[str, ...]
    blocks: int
    block: int
    tensors: int = 1

    @property
    def pads(self) -> int:
        """Positions that are pads, over all devices."""
        return self.blocks * self.block - self.dim.size

    @property
    def share(self) -> float:
        """The share of all positions that is pads."""
        return self.pads / (self.blocks * self.block)


@dataclass(frozen=True, slots=True)
class PaddedTensor:
    """A padded input or buffer at the peak; the bytes of its pads are per device, on average."""

    name: str
    value: Value
    share: float
    bytes: float


@dataclass(frozen=True)
class Pads:
    """All that is padded.

    Attributes:
        dims: every dim of the program that is padded, the largest share first.
        tensors: the padded inputs and buffers at the peak, most bytes of pads first.
        input_bytes: pads of the inputs per device; `peak_bytes` of everything at the peak.
    """

    dims: tuple[PaddedDim, ...]
    tensors: tuple[PaddedTensor, ...]
    input_bytes: float
    peak_bytes: float


def padded_dims(value: Value, mesh: Mesh) -> list[PaddedDim]:
    """Returns the dims of a value that have pads."""
    padded = []
    for name, axes in value.layout.splits:
        dim, block, blocks = value.shape.find(name), value.local.find(name), mesh.extent(axes)
        if dim is not None and block is not None and block.size * blocks != dim.size:
            padded.append(PaddedDim(dim, axes, blocks, block.size))
    return padded


def share(value: Value, mesh: Mesh) -> float:
    """Returns the share of a value's shards that is pads."""
    used = 1.0
    for one in padded_dims(value, mesh):
        used *= 1 - one.share
    return 1 - used


def pads(program: SpmdProgram, named: Iterable[tuple[str, Buffer]]) -> Pads:
    """Returns the pads of a program.

    Args:
        named: buffers at the peak, with names.
    """
    mesh = program.mesh
    counted: dict[PaddedDim, int] = {}
    for value in dict.fromkeys(_values(program.block)):
        for one in padded_dims(value, mesh):
            counted[one] = counted.get(one, 0) + 1
    dims = [PaddedDim(d.dim, d.axes, d.blocks, d.block, n) for d, n in counted.items()]
    inputs = dict(zip(program.block.inputs, program.input_paths, strict=True))
    alive = {one.value: one.path or name for name, one in named}
    tensors = [
        PaddedTensor(name, value, part, part * value.bytes)
        for value, name in {**alive, **inputs}.items()
        if (part := share(value, mesh))
    ]
    return Pads(
        tuple(sorted(dims, key=lambda d: -d.share)),
        tuple(sorted(tensors, key=lambda t: -t.bytes)),
        sum(t.bytes for t in tensors if t.value in inputs),
        sum(t.bytes for t in tensors if t.value in alive),
    )


def _values(block: Block) -> Iterator[Value]:
    yield from block.inputs
    for instruction in block.instructions:
        yield from instruction.outputs
        for body in instruction.bodies:
            yield from _values(body)
