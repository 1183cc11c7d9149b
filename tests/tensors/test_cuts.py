"""Cuts: dims of any size in equal blocks, and joined again."""

import itertools

import numpy as np
import pytest

from meshdsl.tensors.cuts import cut, join, pad, part, places, unpad

COUNTS = [(1,), (2,), (5,), (8,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]


def blocks_of(positions, counts):
    """Cuts a list level by level, as the definition says; pads are None."""
    if not counts:
        return [positions]
    size = -(-len(positions) // counts[0])
    parts = [positions[i * size : (i + 1) * size] for i in range(counts[0])]
    padded = [part + [None] * (size - len(part)) for part in parts]
    return [block for part in padded for block in blocks_of(part, counts[1:])]


def test_five_cut_by_two_and_two():
    assert cut(np, np.arange(1, 6), 0, [2, 2]).tolist() == [1, 2, 3, 0, 4, 5, 0, 0]


@pytest.mark.parametrize("counts", COUNTS)
def test_each_level_makes_equal_blocks_of_the_one_before(counts):
    for size in range(1, 14):
        expected = [p for block in blocks_of(list(range(size)), counts) for p in block]
        stored = cut(np, np.arange(size) + 1, 0, counts)
        assert [p is not None for p in expected] == (stored > 0).tolist()
        assert [p + 1 for p in expected if p is not None] == stored[stored > 0].tolist()


@pytest.mark.parametrize("counts", COUNTS)
def test_joining_drops_the_pads_wherever_they_are(counts):
    for size in range(1, 14):
        x = np.arange(2 * size * 3).reshape(2, size, 3)
        assert np.array_equal(join(np, cut(np, x, 1, counts), 1, counts, size), x)


@pytest.mark.parametrize("counts", COUNTS)
def test_the_part_of_a_block_is_what_it_holds_besides_pads(counts):
    for size in range(1, 14):
        for number, block in enumerate(blocks_of(list(range(size)), counts)):
            at = places(counts, number)
            assert at == list(list(itertools.product(*map(range, counts)))[number])
            start, stop = part(size, counts, at)
            assert list(range(start, stop)) == [p for p in block if p is not None]


def test_what_divides_is_not_touched():
    x = np.arange(8)
    assert cut(np, x, 0, [2, 2]) is x
    assert join(np, x, 0, [2, 2], 8) is x
    assert pad(np, x, ()) is x
    assert unpad(np, x, (), (8,)) is x


def test_every_dim_of_an_array_is_padded_and_unpadded():
    x = np.arange(5 * 4 * 3).reshape(5, 4, 3)
    stored = pad(np, x, ((2, 2), (), (2,)))
    assert stored.shape == (8, 4, 4)
    assert np.array_equal(unpad(np, stored, ((2, 2), (), (2,)), x.shape), x)
