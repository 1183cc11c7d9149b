"""Byte-level text: windows, and how they are split."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.training.data import SEPARATOR, VOCABULARY, ByteCorpus, text_files


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


def corpus_of(size: int) -> ByteCorpus:
    """A corpus whose windows can be told apart: little-endian 16-bit numbers, one after another."""
    return ByteCorpus(np.arange(size // 2 + 1, dtype="<u2").view(np.uint8)[:size])


def test_documents_follow_one_another_each_ended_by_the_separator(tmp_path):
    write(tmp_path, a="one", b="two")
    corpus = ByteCorpus.read(text_files(f"{tmp_path}/*.txt"))
    assert bytes(corpus.text) == b"one\0two\0"
    assert SEPARATOR == 0
    assert corpus.text.max() < VOCABULARY
    with pytest.raises(ValueError, match="read-only"):
        corpus.text[0] = 1


@settings(deadline=None)
@given(
    size=st.integers(1, 4000),
    length=st.integers(1, 50),
    held_out=st.integers(2, 30),
    batch_size=st.integers(1, 4),
)
def test_the_two_splits_are_disjoint_and_cover_the_text(size, length, held_out, batch_size):
    position = np.arange(size, dtype=np.int64)  # every byte known by its place in the text
    needed = held_out * batch_size * (length + 1)
    if size < needed:
        with pytest.raises(ValueError, match=f"{size:,} bytes.* needs {needed:,}"):
            ByteCorpus(position).split(length, batch_size=batch_size, held_out=held_out)
        return
    splits = ByteCorpus(position).split(length, batch_size=batch_size, held_out=held_out)
    seen = []
    for windows in splits:
        assert len(windows) >= batch_size
        batch = windows[np.arange(len(windows))]
        seen.append(np.column_stack([batch["tokens"], batch["targets"][:, -1]]).ravel())
    used = size - size % (length + 1)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), position[:used])
    assert len(splits[1]) == used // (length + 1) // held_out


def test_targets_are_the_inputs_shifted_by_one():
    train, _ = corpus_of(5000).split(16, batch_size=1)
    batch = train[np.array([3, 0])]
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["tokens"][1], corpus_of(5000).text[:16])
    assert batch["tokens"].shape == batch["targets"].shape == (2, 16)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32


def test_text_added_at_the_end_moves_no_window_between_the_splits():
    short, long = corpus_of(9000), corpus_of(12000)
    for before, after in zip(
        short.split(16, batch_size=2), long.split(16, batch_size=2), strict=True
    ):
        np.testing.assert_array_equal(before.chosen, after.chosen[: len(before)])


def test_a_text_too_short_says_what_it_has_and_what_is_needed():
    with pytest.raises(ValueError) as error:
        corpus_of(1234).split(128, batch_size=32)
    assert str(error.value) == (
        "the text is too short: it has 1,234 bytes, and "
        "batch_size=32 with length=128 needs 82,560\n"
        "  (32 held-out windows of 129 bytes, one window in 20 being held out).\n"
        "  Give more text, or a smaller batch_size or length."
    )
