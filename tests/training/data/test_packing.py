"""Packing, against the same in plain Python."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.training.data import Documents, PackedRows, Tokens


def packed_by_hand(documents, length):
    """Returns rows as lists of (inputs, targets)."""
    full, rest = [], []
    for document in documents:
        pairs = list(pairwise(document))
        pieces = [pairs[at : at + length] for at in range(0, len(pairs), length)]
        for piece in pieces:
            (full if len(piece) == length else rest).append(piece)
    rows = [[piece] for piece in full]
    row = []
    for piece in rest:
        if sum(map(len, row)) + len(piece) > length:
            rows.append(row)
            row = []
        row.append(piece)
    return rows + [row] * bool(row)


@given(
    sizes=st.lists(st.integers(0, 20), max_size=25),
    length=st.integers(1, 9),
)
def test_rows_are_those_packed_by_hand(sizes, length):
    bounds = np.cumsum([0, *sizes])
    ids = np.arange(1, bounds[-1] + 1, dtype=np.uint16)
    documents = [ids[a:b].tolist() for a, b in pairwise(bounds)]
    packed = PackedRows.of(Documents.of([Tokens("a", ids, bounds)], 1000), length)
    batch = packed[np.arange(len(packed))]
    expected = packed_by_hand(documents, length)
    assert len(packed) == len(expected)
    for number, pieces in enumerate(expected):
        pairs = [pair for piece in pieces for pair in piece]
        empty = [0] * (length - len(pairs))
        assert batch["tokens"][number].tolist() == [a for a, _ in pairs] + empty
        assert batch["targets"][number].tolist() == [b for _, b in pairs] + empty
        segments = [n for n, piece in enumerate(pieces, 1) for _ in piece]
        positions = [n for piece in pieces for n in range(len(piece))]
        assert batch["segments"][number].tolist() == segments + empty
        assert batch["positions"][number].tolist() == positions + empty
    assert all(array.dtype == np.int32 for array in batch.values())
    targets = batch["targets"][batch["segments"] > 0]
    assert sorted(targets) == [token for document in documents for token in document[1:]]


def test_one_row_in_twenty_is_held_out():
    documents = Documents.of([Tokens("a", np.arange(1000), np.arange(0, 1001, 10))], 1000)
    train, held_out = PackedRows.of(documents, 9).split(20)
    assert held_out.chosen.tolist() == [19, 39, 59, 79, 99]
    assert sorted([*train.chosen, *held_out.chosen]) == list(range(100))
    np.testing.assert_array_equal(held_out[np.array([1])]["tokens"], [np.arange(390, 399)])
