"""Tiles: the bytes of images on devices that store tensors in tiles of lanes and sublanes.

A TPU stores the two last dims of a tensor, in the order that its compiler chooses, in tiles of
`Tile.sublanes` x `Tile.lanes` elements, and fills these up. Most tensors of a transformer fill
them. The images of a convolution may not: the lanes have either its features or its batch. If the
batch is small, the compiler divides the last spatial dim into `SPLITS` parts, which count to the
batch, each with a position of its neighbour at the end ("space to batch" in XLA). What only
convolutions read is rounded where it is made.

An image of 8 features, 2 x 16 x 64 x 64 in float32, has 4 MiB of numbers and takes 36 MiB: it uses
16 of 128 lanes, and 9 positions stand for 8. So says the buffer assignment of libtpu 0.0.52.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshdsl.layouts.hardware import Tile
from meshdsl.lowering.parameters import Convolve, parameters_of
from meshdsl.lowering.program import Block, Value

SPLITS = 8  # of XLA's `SpaceToBatchConverter`
_ROUNDED = 2  # bytes of a number that a matrix unit multiplies


@dataclass(frozen=True)
class Images:
    """What the convolutions of a program say of its values.

    Attributes:
        tile: how the device stores tensors.
        spatial: the dims along which windows slide, of each convolution, in the order of the
            program. Those of the first one that fits a value count for it.
        batch: the dims that convolutions do not touch.
        operands: the values that only convolutions read.
    """

    tile: Tile
    spatial: tuple[tuple[str, ...], ...]
    batch: frozenset[str]
    operands: frozenset[Value]

    @staticmethod
    def of(block: Block, tile: Tile) -> Images:
        """Returns what the convolutions of a block and its bodies say."""
        spatial: dict[tuple[str, ...], None] = {}
        batch: set[str] = set()
        operands: set[Value] = set()
        others: set[Value] = {*block.outputs}
        for instruction, _ in block.walk():
            if instruction.op != "convolve":
                others.update(instruction.inputs)
                others.update(value for body in instruction.bodies for value in body.outputs)
                continue
            operands.update(instruction.inputs)
            slides = parameters_of(instruction, Convolve)["slides"]
            if all(slide.x == slide.out for slide in slides):  # else it is the gradient of a kernel
                names = tuple(slide.x for slide in slides)
                image, kernel = instruction.inputs
                spatial[names] = None
                batch |= {*image.local.names} - {*names} - {*kernel.local.names}
        return Images(tile, tuple(spatial), frozenset(batch), frozenset(operands - others))

    def bytes(self, value: Value) -> int:
        """Returns the bytes of a value on one device."""
        names = next((n for n in self.spatial if {*n} <= {*value.local.names}), None)
        if names is None:
            return value.bytes
        sizes = {dim.name: dim.size for dim in value.local}
        across = math.prod(sizes.pop(name) for name in names[:-1])
        along = sizes.pop(names[-1])
        batch = math.prod(sizes.pop(name) for name in self.batch & sizes.keys())
        features = math.prod(sizes.values())
        fill = self.tile.filled
        if along >= SPLITS > batch:
            along, batch = -(-along // SPLITS) + 1, SPLITS * batch
            least = along * min(fill(features, batch), fill(batch, features))
        else:
            least = min(batch * fill(along, features), along * fill(features, batch))
        width = value.dtype.itemsize
        return across * least * (min(width, _ROUNDED) if value in self.operands else width)


def sizes(block: Block, tile: Tile | None) -> Mapping[Value, int]:
    """Returns the bytes of the values of a block and its bodies that fill up tiles.

    The block's own inputs are stored without gaps: users hand them over as they are.
    """
    if tile is None or not _has_convolution(block):  # as most have none
        return {}
    images = Images.of(block, tile)
    if not images.spatial:
        return {}
    given = {*block.inputs}
    values = (v for i, _ in block.walk() for v in (*i.inputs, *i.outputs) if v not in given)
    return {value: images.bytes(value) for value in values}


def _has_convolution(block: Block) -> bool:
    return any(
        [
            one.op == "convolve" or any(map(_has_convolution, one.bodies))
            for one in block.instructions
        ]
    )
