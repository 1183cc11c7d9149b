"""Caches of attention: what is kept of earlier positions, so that a step reads only what is new.

A cache is a tensor [batch, memory_length, ...], of keys, of values, or of what they are made of.
Layouts split it as any tensor: `memory_length:model` gives each device a part of the positions
(flash-decoding), `heads:model` a part of the heads.

A position has the slot `position % memory_length`. So a cache that is shorter than the text keeps
the latest positions, which is all that attention with a window needs.
"""

from __future__ import annotations

from typing import Any

import meshdsl as md
from meshdsl.tensors.dims import Dimension


class Slots:
    """Where the tokens of one step are in a cache, and which positions its slots then hold.

        slots = nn.Slots(x.shape.get("length"), keys.shape.get("memory_length"), start, pads)
        keys, values = slots.write(keys, k), slots.write(values, v)
        mixed = md.attention(q, keys, values, causal=True, **slots.visible)

    Rows of a batch may begin with pads, so that texts of different lengths end at one position.
    Pads are hidden from attention.

    Attributes:
        positions: of the step's tokens, counted from the first pad: [length].
        text_positions: of the step's tokens in their texts: [batch, length]; of pads, 0.
        memory_positions: those that the slots hold after the step, negative if none:
            [memory_length].
        visible: the arguments of `md.attention` that tell it the positions, and hide pads.

    Args:
        length: the dim of the step's tokens.
        memory: the dim of the slots.
        start: s32[]; how many positions precede the step, pads included. If several tokens are
            written to a cache that is shorter than the text, the slots must not wrap among them:
            let their number divide `start` and the number of slots.
        pads: s32[batch]; how many positions at the start of a row are pads.

    Examples:
        >>> length, memory = md.dims(length=2, memory_length=4)
        >>> pads = md.named([0, 1], ["batch"])  # the second text begins with a pad
        >>> slots = md.nn.Slots(length, memory, md.named(2, []), pads)
        >>> print(slots.positions, slots.text_positions)
        s32[length=2] [2 3] s32[length=2, batch=2] [[2 1]
         [3 2]]
        >>> cache, fresh = md.zeros([*pads.dims, memory]), md.ones([*pads.dims, length])
        >>> print(slots.write(cache, fresh))
        f32[batch=2, memory_length=4] [[0. 0. 1. 1.]
         [0. 0. 1. 1.]]
    """

    def __init__(
        self, length: Dimension, memory: Dimension, start: md.Tensor, pads: md.Tensor
    ) -> None:
        self.length, self.memory, self.start = length, memory, start
        self.positions = md.arange(length) + start
        self.text_positions = md.maximum(md.outer(md.subtract, self.positions, pads), 0)
        last, size = start + (length.size - 1), memory.size
        self.memory_positions = last - (last - md.arange(memory)) % size
        # A slot without a position has a negative one, which is before that of any token.
        filled = md.outer(md.greater_equal, self.memory_positions, pads)
        self.visible: dict[str, Any] = {
            "positions": self.positions,
            "memory_positions": self.memory_positions,
            "mask": filled,
        }

    def write(self, cache: md.Tensor, fresh: md.Tensor) -> md.Tensor:
        """Returns a cache with the values of the step's tokens at their slots.

        Args:
            cache: [batch, memory_length, ...].
            fresh: [batch, length, ...], in any order.
        """
        update = fresh.rename({self.length.name: self.memory.name})
        at = self.start % self.memory.size
        return md.dynamic_update_slice(cache, update, self.memory.name, at)


def slots_needed(positions: int, window: int | None = None, chunk: int = 1) -> int:
    """Returns how many slots a text needs, if it is read in chunks of equal size.

    `nn.slots_needed(4096, window=512, chunk=128)` is 640. Without a window, a text needs a slot
    for each position.

    Examples:
        >>> md.nn.slots_needed(4096, window=512, chunk=128)
        640
    """
    if window is None:
        return positions
    return min(positions, -(-(window + chunk - 1) // chunk) * chunk)
