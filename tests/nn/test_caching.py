"""Slots of caches: which position has which, also where a cache is shorter than the text."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn


def slots_after(size, pieces, pads=(0, 2), **where):
    """Returns the positions, what is visible, and a cache that has each position's number."""
    pads = md.named(np.array(pads, "int32"), ["batch"])
    memory = md.Dimension("memory_length", size)
    cache = md.named(np.full((len(pads.data), size), -1.0), ["batch", "memory_length"])
    start = 0
    for length in pieces:

        def step(cache, pads, start, length=length):
            slots = nn.Slots(md.Dimension("length", length), memory, start, pads)
            fresh = md.broadcast(md.cast(slots.positions, "float64"), [*pads.dims, slots.length])
            return {
                "cache": slots.write(cache, fresh),
                "memory_positions": slots.memory_positions,
                "text_positions": slots.text_positions.transpose(["batch", "length"]),
                "mask": slots.visible["mask"].transpose(["batch", "memory_length"]),
            }

        number = md.named(np.int32(start), [])
        found = md.jit(step, backend="numpy", **where)(cache, pads, number)
        cache, start = found["cache"], start + length
    return {name: np.asarray(each) for name, each in found.items()}


SPLIT = {"mesh": "data:2,model:3", "layout": "batch:data; memory_length:model"}


@pytest.mark.parametrize("where", [{}, SPLIT])
@pytest.mark.parametrize(
    ("size", "pieces"), [(8, [4, 1, 1]), (8, [4, 4]), (4, [2, 2, 1, 1, 1]), (6, [3, 3, 3])]
)
def test_each_slot_holds_the_position_that_it_says(size, pieces, where):
    found, end = slots_after(size, pieces, **where), sum(pieces)
    latest = {at % size: at for at in range(end)}
    for slot, position in enumerate(found["memory_positions"]):
        assert position == latest.get(slot, slot - size)
        assert (found["cache"][:, slot] == latest.get(slot, -1)).all()
    seen = {row: set(found["memory_positions"][list(m)]) for row, m in enumerate(found["mask"])}
    assert seen[0] == set(range(max(0, end - size), end))
    assert seen[1] == set(range(max(2, end - size), end))


def test_positions_in_texts_count_from_the_first_token():
    found = slots_after(8, [4], pads=(0, 2))["text_positions"]
    assert found.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]


def test_a_window_needs_slots_for_itself_and_the_chunk():
    assert nn.slots_needed(4096) == 4096
    assert nn.slots_needed(4096, window=512, chunk=128) == 640
    assert nn.slots_needed(4096, window=512) == 512
    assert nn.slots_needed(100, window=512) == 100
