"""Token files of Megatron-LM, against the format written out with `struct`."""

import pickle
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.training.data import TokenFile, write_token_file

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def by_hand(path, sequences, documents, dtype="int32", magic=b"MMIDIDX\x00\x00", version=1):
    """Writes a token file as Megatron-LM's documentation of the format says, number by number."""
    code, size = CODES.get(dtype, 7), np.dtype(dtype).itemsize
    path.write_bytes(
        b"".join(np.asarray(s, f"<{np.dtype(dtype).str[1:]}").tobytes() for s in sequences)
    )
    index = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents))
    index += b"".join(struct.pack("<i", len(s)) for s in sequences)
    start = 0
    for sequence in sequences:
        index += struct.pack("<q", start)
        start += len(sequence) * size
    index += b"".join(struct.pack("<q", number) for number in documents)
    path.with_suffix(".idx").write_bytes(index)


@pytest.mark.parametrize("dtype", CODES)
def test_files_of_every_dtype_are_read(tmp_path, dtype):
    by_hand(tmp_path / "a.bin", [[1, 2, 3], [4], [], [5, 120]], [0, 1, 3, 4], dtype)
    tokens = TokenFile(tmp_path / "a.bin")
    assert isinstance(tokens.ids, np.memmap)
    assert tokens.ids.dtype == dtype
    assert tokens.ids.tolist() == [1, 2, 3, 4, 5, 120]
    assert tokens.bounds.tolist() == [0, 3, 4, 6]  # the second document has two sequences


@settings(max_examples=20)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=9), max_size=9),
    dtype=st.sampled_from(sorted(CODES)),
)
def test_files_are_written_byte_by_byte_as_by_hand(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("tokens")
    write_token_file(folder / "a.bin", [np.asarray(d, np.int64) for d in documents], dtype)
    by_hand(folder / "b.bin", documents, range(len(documents) + 1), dtype)
    for suffix in (".bin", ".idx"):
        assert (folder / f"a{suffix}").read_bytes() == (folder / f"b{suffix}").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]
    read = TokenFile(folder / "a.bin")
    assert [
        read.ids[a:b].tolist() for a, b in zip(read.bounds, read.bounds[1:], strict=False)
    ] == documents


def test_a_copy_in_another_process_maps_the_file_again(tmp_path):
    write_token_file(tmp_path / "a.bin", [np.arange(100_000)])
    stored = pickle.dumps(TokenFile(tmp_path / "a.bin"))
    assert len(stored) < 1000
    copy = pickle.loads(stored)
    assert isinstance(copy.ids, np.memmap)
    np.testing.assert_array_equal(copy.ids, np.arange(100_000))


def damage(path, what):
    index = path.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    match what:
        case "no index":
            index.unlink()
        case "a short index":
            index.write_bytes(content[:-1])
        case "no header":
            index.write_bytes(content[:20])
        case "short tokens":
            path.write_bytes(path.read_bytes()[:-4])
        case "long tokens":
            path.write_bytes(path.read_bytes() + b"\0\0")
        case "a moved sequence":
            content[34 + 8 + 8] += 4  # where the second of two sequences starts
            index.write_bytes(content)
        case "a document too many":
            content[-8] += 1
            index.write_bytes(content)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no index", "{bin} needs its index beside it, a.idx"),
        ("a short index", "{idx} is cut short: it has 81 bytes, and needs 82"),
        ("no header", "{idx} is no index of a token file: it does not begin with MMIDIDX"),
        (
            "short tokens",
            "{bin} is cut short: it has 16 bytes, and its index tells of 20 (5 tokens of int32)",
        ),
        (
            "long tokens",
            "{bin} is too long: it has 22 bytes, and its index tells of 20 (5 tokens of int32)",
        ),
        ("a moved sequence", "{idx} is damaged: its sequences do not follow one another"),
        ("a document too many", "{idx} is damaged: its documents do not cover its sequences"),
    ],
)
def test_damaged_files_are_refused(tmp_path, what, text):
    path = tmp_path / "a.bin"
    by_hand(path, [[1, 2, 3], [4, 5]], [0, 1, 2])
    damage(path, what)
    with pytest.raises(ValueError) as error:
        TokenFile(path)
    assert str(error.value) == text.format(bin=path, idx=path.with_suffix(".idx"))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "is no index of a token file: it does not begin with"),
        ({"version": 2}, "has version 2 of the format; version 1 is read"),
        (
            {"dtype": "float32"},
            "has the dtype code 7 (float32); tokens have one of 1 uint8, 2 int8, 3 int16, 4 int32, "
            "5 int64, 8 uint16",
        ),
    ],
)
def test_files_of_another_format_are_refused(tmp_path, given, text):
    by_hand(tmp_path / "a.bin", [[1]], [0, 1], **given)
    with pytest.raises(ValueError, match=re.escape(text)):
        TokenFile(tmp_path / "a.bin")


def test_what_the_format_cannot_hold_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"hold uint8, int8, .*, uint16, not float32"):
        write_token_file(tmp_path / "a.bin", [], "float32")
    with pytest.raises(ValueError, match=r"document 1 has tokens that uint8 cannot hold"):
        write_token_file(tmp_path / "a.bin", [np.array([1]), np.array([256])], "uint8")
    assert not list(tmp_path.iterdir())


def test_a_file_without_documents_is_read(tmp_path):
    write_token_file(tmp_path / "a.bin", [])
    assert TokenFile(tmp_path / "a.bin").bounds.tolist() == [0]
