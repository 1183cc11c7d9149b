"""Windows of a text, and how they are split; that they cover it is in test_documents."""

import numpy as np
import pytest

from meshdsl.training.data import Documents, DocumentWindows, Tokens


def windows_of(size: int, length: int = 16) -> DocumentWindows:
    """Windows that can be told apart: the ids count on."""
    ids = np.arange(size)
    return DocumentWindows.of(Documents.of([Tokens("a", ids, np.array([0, size]))], size), length)


def test_targets_are_the_inputs_shifted_by_one():
    batch = windows_of(5000)[np.array([3, 0])]
    np.testing.assert_array_equal(batch["tokens"], [np.arange(51, 67), np.arange(16)])
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32


def test_text_added_at_the_end_moves_no_window_between_the_splits():
    for before, after in zip(windows_of(9000).split(), windows_of(12000).split(), strict=True):
        assert 0 < len(before) < len(after)
        np.testing.assert_array_equal(before.chosen, after.chosen[: len(before)])


def test_all_windows_cannot_be_held_out():
    with pytest.raises(ValueError, match=r"held_out must be at least 2, got 1"):
        windows_of(100).split(held_out=1)
