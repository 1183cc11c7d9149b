"""Documents: where they lie, and ids outside of the vocabulary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.training.data import Documents, DocumentWindows, Tokens
from meshdsl.training.data.documents import unmarked

FILES = st.lists(st.lists(st.integers(0, 7), max_size=5), min_size=1, max_size=4)


def files_of(sizes):
    """Files with documents of these sizes, whose ids count on from one to the next."""
    start, found = 0, []
    for number, file in enumerate(sizes):
        bounds = np.cumsum([0, *file])
        found.append(Tokens(f"file{number}", np.arange(start, start + bounds[-1]), bounds))
        start += bounds[-1]
    return found


@given(sizes=FILES, which=st.randoms(), size=st.integers(1, 9))
def test_runs_over_chosen_documents_are_those_of_the_joined_text(sizes, which, size):
    documents = Documents.of(files_of(sizes), 10_000)
    assert documents.sizes.tolist() == [n for file in sizes for n in file if n]
    chosen = documents.chosen(np.array([which.random() < 0.6 for _ in range(len(documents))], bool))
    ends = np.cumsum(documents.sizes)
    kept = [number in chosen.starts for number in ends - documents.sizes]
    rows = zip(ends, documents.sizes, kept, strict=True)
    joined = np.concatenate([[], *(np.arange(e - n, e) for e, n, keep in rows if keep)])
    starts = np.arange(max(len(joined) - size + 1, 0))
    for start, pieces in zip(starts, chosen.pieces(starts, size), strict=True):
        found = np.concatenate([documents.read(a, b) for a, b in pieces])
        np.testing.assert_array_equal(found, joined[start : start + size])


@given(sizes=FILES, length=st.integers(1, 6))
def test_windows_cover_the_text_without_overlap(sizes, length):
    documents = Documents.of(files_of(sizes), 10_000)
    windows = DocumentWindows.of(documents, length)
    batch = windows[np.arange(len(windows))]
    text = np.column_stack([batch["tokens"], batch["targets"][:, -1]]).ravel()
    total = int(documents.sizes.sum())
    np.testing.assert_array_equal(text, np.arange(total - total % (length + 1)))
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    train, held_out = windows.split(3)
    assert sorted([*train.chosen, *held_out.chosen]) == list(range(len(windows)))
    assert held_out.chosen.tolist() == list(range(2, len(windows), 3))


def test_an_id_outside_of_the_vocabulary_is_told_with_its_file_and_place():
    first = Tokens("a.bin", np.arange(6, dtype=np.uint16), np.array([0, 6]))
    second = Tokens("b.bin", np.array([0, 1, 2, 70, 80], np.int32), np.array([0, 2, 5]))
    third = Tokens("c.bin", np.array([1, -3], np.int32), np.array([0, 2]))
    documents = Documents.of([first, second, third], 50)
    assert documents.read(6, 9).tolist() == [0, 1, 2]
    text = (
        "b.bin: token 3 has the id 70, outside of the vocabulary of 50; the data was made with "
        "another tokenizer, or the file is damaged"
    )
    with pytest.raises(ValueError) as error:
        documents.read(8, 11)
    assert str(error.value) == text
    with pytest.raises(ValueError) as error:
        DocumentWindows.of(documents, 5)[np.array([1])]
    assert str(error.value) == text
    assert documents.outside(most=100) == [
        text,
        text.replace("b.bin: token 3 has the id 70", "c.bin: token 1 has the id -3"),
    ]
    assert documents.outside(most=3) == []
    assert documents.outside(most=9) == [
        text.replace("b.bin: token 3 has the id 70", "c.bin: token 1 has the id -3"),
    ]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), most=st.integers(0, 60))
def test_the_tokens_that_are_looked_at_are_shared_among_the_files(sizes, most):
    class Read(np.ndarray):
        """Ids that count how many of them are read."""

        count = 0

        def __getitem__(self, which):
            Read.count += which.stop - which.start
            return np.zeros(which.stop - which.start, np.int64)

    files = [Tokens(str(n), np.zeros(n, int).view(Read), np.array([0, n])) for n in sizes]
    assert Documents.of(files, 10).outside(most) == []
    assert Read.count <= most
    if most >= len(sizes) * max(sizes):
        assert Read.count == sum(sizes)


def test_fingerprints_tell_other_data_apart():
    ids = np.arange(100_000, dtype=np.int32)
    one = Tokens("a", ids, np.array([0, 7, len(ids)]))
    assert one.fingerprint() == Tokens("elsewhere", ids, one.bounds).fingerprint()
    others = [
        Tokens("a", ids[:-1], one.bounds),
        Tokens("a", ids.astype(np.int64), one.bounds),
        Tokens("a", ids, np.array([0, 8, len(ids)])),
        Tokens("a", np.where(ids == 99_999, 0, ids), one.bounds),
        Tokens("a", np.where(ids == 50_001, 0, ids), one.bounds),
    ]
    assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 6


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_tokens_that_are_all_learned_may_be_unsigned(dtype):
    ids = np.array([0, 3, 255], dtype)
    np.testing.assert_array_equal(unmarked(ids), [0, 3, 255])
    assert unmarked(np.array([-1, -4, 7])).tolist() == [0, 3, 7]
