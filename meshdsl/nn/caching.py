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
        reach: how many positions of a text there is room for.
        pages: those of a paged cache, after the step; see `PagedSlots`.

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
        self._begin(length, memory, start, pads)
        self.reach: int = memory.size
        self.pages: Pages | None = None
        last, size = start + (length.size - 1), memory.size
        self.memory_positions = last - (last - md.arange(memory)) % size
        # A slot without a position has a negative one, which is before that of any token.
        filled = md.outer(md.greater_equal, self.memory_positions, pads)
        self.visible: dict[str, Any] = {
            "positions": self.positions,
            "memory_positions": self.memory_positions,
            "mask": filled,
        }

    def _begin(
        self, length: Dimension, memory: Dimension, start: md.Tensor, pads: md.Tensor
    ) -> None:
        self.length, self.memory, self.start = length, memory, start
        self.positions = md.arange(length) + start
        self.text_positions = md.maximum(md.outer(md.subtract, self.positions, pads), 0)

    def write(self, cache: md.Tensor, fresh: md.Tensor) -> md.Tensor:
        """Returns a cache with the values of the step's tokens at their slots.

        Args:
            cache: [batch, memory_length, ...].
            fresh: [batch, length, ...], in any order.
        """
        update = fresh.rename({self.length.name: self.memory.name})
        at = self.start % self.memory.size
        return md.dynamic_update_slice(cache, update, self.memory.name, at)


class Pages(md.Module):
    """Which text has each slot of a paged cache: one that all rows of a batch share.

    Texts get slots as they grow, a page of them at a time. So the cache has room for the tokens
    that there are, and not for the longest text in each row. Who calls the steps hands the pages
    out: a step is told one slot for each row.

    Attributes:
        rows: s32[memory_length]; the row whose text has the slot; -1: none has.
        positions: s32[memory_length]; the position that the slot holds, if a row has it.
        next: s32[batch]; the slot that each row's next token gets; -1: the row has no text.
        reach: the most positions of a text.

    Examples:
        >>> slots, batch = md.Dimension("memory_length", 4), md.Dimension("batch", 2)
        >>> pages = md.nn.Pages.empty(slots, batch, reach=3)
        >>> print(pages.rows, pages.next)
        s32[memory_length=4] [-1 -1 -1 -1] s32[batch=2] [-1 -1]
    """

    rows: md.Tensor
    positions: md.Tensor
    next: md.Tensor
    reach: int = md.static()

    @classmethod
    def empty(cls, memory: Dimension, batch: Dimension, reach: int) -> Pages:
        """Returns those of a cache that no text has a slot of."""
        none = md.full([memory], -1, "int32")
        return cls(none, none, md.full([batch], -1, "int32"), reach)


class PagedSlots(Slots):
    """Where the tokens of one step are in a paged cache; otherwise as `Slots`.

    The cache has no `batch`: [memory_length, ...]. The queries of all rows meet all of its slots,
    and those of other rows are hidden. So nothing is copied, layouts split it as any cache, and the
    slots are read once for all rows, which takes less time than a cache for each row as long as
    reading limits the step. The products grow with rows times slots.

    Attributes:
        memory_positions: those that the slots hold after the step, of whichever row.

    Args:
        length: the dim of the step's tokens, of size 1.
        pages: before the step.

    Raises:
        ValueError: the step has several tokens of a text.

    Examples:
        >>> length, batch, memory = md.dims(length=1, batch=2, memory_length=4)
        >>> pages = md.nn.Pages.empty(memory, batch, reach=3)
        >>> pages = pages.replace(next=md.named([3, 1], ["batch"]))
        >>> pads = md.named([0, 5], ["batch"])  # the second text begins here
        >>> slots = md.nn.PagedSlots(length, memory, md.named(5, []), pads, pages)
        >>> print(slots.write(md.zeros([memory]), md.named([[7.0], [8.0]], ["batch", "length"])))
        f32[memory_length=4] [0. 8. 0. 7.]
        >>> print(slots.pages.rows)
        s32[memory_length=4] [-1  1 -1  0]
    """

    def __init__(
        self,
        length: Dimension,
        memory: Dimension,
        start: md.Tensor,
        pads: md.Tensor,
        pages: Pages,
    ) -> None:
        if length.size != 1:
            raise ValueError(
                f"a step writes one token of each text to a paged cache, got {length}; read a "
                "prompt with a cache of its own, and copy that to pages"
            )
        self._begin(length, memory, start, pads)
        self._next, batch = pages.next, md.arange(pads.shape.get("batch"))
        rows = md.scatter(pages.rows, self._next, batch, memory, unique=True)
        positions = md.scatter(pages.positions, self._next, start, memory, unique=True)
        self.reach = pages.reach
        self.pages = pages.replace(rows=rows, positions=positions)
        self.memory_positions = positions
        self.visible = {
            "positions": self.positions,
            "memory_positions": positions,
            "mask": md.outer(md.equal, batch, rows),
        }

    def write(self, cache: md.Tensor, fresh: md.Tensor) -> md.Tensor:
        """Returns a cache with the values of the step's tokens at their slots.

        Args:
            cache: [memory_length, ...].
            fresh: [batch, length=1, ...], in any order.
        """
        values = md.index(fresh, self.length, 0)
        return md.scatter(cache, self._next, values, self.memory, unique=True)


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
