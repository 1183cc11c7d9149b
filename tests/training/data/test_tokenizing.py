"""From files of every kind to documents of tokens."""

import os
import sys
import time

import numpy as np
import pytest

from meshdsl.training.data import (
    Bytes,
    TokenFile,
    compared,
    data_files,
    load_tokenizer,
    write_token_file,
)
from meshdsl.training.data.records import read_documents
from meshdsl.training.data.tokenizing import read_tokens
from tests.training.data.files import write_array_record, write_parquet, write_tokenizer

TEXTS = [b"a named dim", b"of", b"", b"a tensor", b"dim"]


def documents_of(tokens):
    return [
        tokens.ids[a:b].tolist() for a, b in zip(tokens.bounds, tokens.bounds[1:], strict=False)
    ]


def write_all(folder):
    """Writes five documents in files of three kinds; returns the files in order."""
    write_array_record(folder / "a.arrayrecord", TEXTS[:3])
    write_parquet(folder / "b.parquet", n=[1], text=[TEXTS[3].decode()])
    (folder / "c.txt").write_bytes(TEXTS[4])
    return sorted(folder.iterdir())


def test_documents_of_every_kind_of_file_follow_one_another(tmp_path):
    problems = []
    (tokens,) = read_tokens(write_all(tmp_path), Bytes(), problems)
    assert problems == []
    assert [bytes(document) for document in documents_of(tokens)] == [t + b"\0" for t in TEXTS]
    assert tokens.ids.dtype == np.uint8
    assert tokens.name == f"{tmp_path}/a.arrayrecord and 2 more"


def test_a_cache_holds_the_tokens_that_memory_would_and_is_written_once(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json", ids=[0, 1, 2, 3, 4, 300]))
    data, cache = tmp_path / "data", tmp_path / "deep" / "cache"
    data.mkdir()
    paths = write_all(data)
    (expected,) = read_tokens(paths, tokenizer, [])
    (found,) = read_tokens(paths, tokenizer, [], cache=cache)
    assert isinstance(found, TokenFile) and found.ids.dtype == expected.ids.dtype == np.uint16
    assert documents_of(found) == documents_of(expected)
    assert documents_of(found) == [[0, 1, 2, 300], [3, 300], [300], [0, 4, 300], [2, 300]]

    stamps = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert sorted(path.suffix for path in stamps) == [".bin", ".idx", ".key", ".sums"]
    read_tokens(paths, tokenizer, [], cache=cache)
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == stamps
    (data / "c.txt").write_bytes(b"dim dim")  # other text is other tokens
    (changed,) = read_tokens(paths, tokenizer, [], cache=cache)
    assert documents_of(changed)[-1] == [2, 2, 300]
    (as_bytes,) = read_tokens(paths, Bytes(), [], cache=cache)
    assert bytes(as_bytes.ids[-8:]) == b"dim dim\0"


def test_parquet_files_have_text_as_strings_or_bytes_in_any_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", body=["x", None, "é"], raw=[b"\xff", b"y", None])
    path = tmp_path / "a.parquet"
    assert list(read_documents(path, "body")) == [
        (f"{path}, row 0", b"x"),
        (f"{path}, row 2", "é".encode()),
    ]
    assert [text for _, text in read_documents(path, "raw")] == [b"\xff", b"y"]


def test_everything_that_cannot_be_read_is_told_and_nothing_is_kept(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"))
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    write_parquet(data / "a.parquet", n=[1, 2])
    write_parquet(data / "b.parquet", text=[1, 2])
    (data / "c.parquet").write_bytes(b"PAR1 and so on")
    (data / "d.arrayrecord").write_bytes(b"no records at all" * 10)
    (data / "e.txt").write_bytes(b"of a \xff dim")
    write_array_record(data / "f.array_record", [b"dim", b"\x80", b"a", b"\xc3("])
    write_token_file(data / "g.bin", [np.arange(3)])
    (data / "g.idx").unlink()
    (data / "h.txt").write_bytes(b"fine")
    for cached in (None, cache):
        problems = []
        read_tokens(sorted(data.iterdir()), tokenizer, problems, cache=cached)
        assert len(problems) == 8
        assert problems[0] == (
            f"{data}/a.parquet has no column `text`, but n: name the one that holds the text with "
            "--data_column"
        )
        assert problems[1] == f"{data}/b.parquet: the column `text` is int64, not text"
        assert problems[2].startswith(f"{data}/c.parquet is not a whole Parquet file: ")
        assert problems[3].startswith(f"{data}/d.arrayrecord is not a whole ArrayRecord file: ")
        utf8 = "is not UTF-8, which the tokenizer needs; without --tokenizer, text may be any bytes"
        assert problems[4:7] == [
            f"{data}/e.txt: byte 5 {utf8}",
            f"{data}/f.array_record, record 1: byte 0 {utf8}",
            f"{data}/f.array_record, record 3: byte 0 {utf8}",
        ]
        assert problems[7] == f"{data}/g.bin needs its index beside it, g.idx"
    assert not list(cache.iterdir())


def test_files_that_go_away_are_told(tmp_path):
    problems = []
    read_tokens([tmp_path / "a.txt", tmp_path / "b.bin"], Bytes(), problems)
    assert problems == [
        f"{tmp_path}/a.txt cannot be read: No such file or directory",
        f"{tmp_path}/b.bin needs its index beside it, b.idx",
    ]
    problems = []
    (tmp_path / "c.txt").write_bytes(b"x")
    cached = [tmp_path / "a.txt", tmp_path / "c.txt", tmp_path / "d.txt"]
    assert read_tokens(cached, Bytes(), problems, cache=tmp_path / "cache") == []
    assert problems == [
        f"{tmp_path}/a.txt cannot be read: No such file or directory",
        f"{tmp_path}/d.txt cannot be read: No such file or directory",
    ]


def test_a_folder_that_cannot_hold_tokens_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    problems = []
    read_tokens([tmp_path / "a.txt"], Bytes(), problems, cache=tmp_path / "a.txt" / "cache")
    assert problems == [f"tokens cannot be kept in {tmp_path}/a.txt/cache: Not a directory"]


def test_without_the_library_of_parquet_it_is_named(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError) as error:
        list(read_documents(tmp_path / "a.parquet"))
    assert str(error.value) == (
        f"{tmp_path}/a.parquet is read by the `pyarrow` library: pip install 'meshdsl[data]'"
    )


def cached(tmp_path):
    """Returns the files of a cache of one text, and what opens it again."""
    (tmp_path / "a.txt").write_bytes(b"a named dim " * 50)
    cache = tmp_path / "cache"

    def opened():
        problems = []
        return read_tokens([tmp_path / "a.txt"], Bytes(), problems, cache=cache), problems

    opened()
    return {path.suffix: path for path in cache.iterdir()}, opened


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_damaged_cache_is_an_error_that_names_the_file_and_the_fix(tmp_path, suffix):
    files, opened = cached(tmp_path)
    size = files[suffix].stat().st_size
    files[suffix].write_bytes(bytes([65]) * size)
    found, problems = opened()
    assert found == [] and problems == [
        f"{files[suffix]} has other bytes than before, between 0 and {size}. It is a cache of "
        f"tokens and is damaged: delete {files['.bin']}, and it is built again"
    ]
    files[".bin"].unlink()
    (tokens,), problems = opened()
    assert problems == [] and bytes(tokens.ids) == b"a named dim " * 50 + b"\0"


@pytest.mark.parametrize("text", [None, "", "[1, 2]"])
def test_a_cache_without_checksums_is_built_again(tmp_path, text):
    files, opened = cached(tmp_path)
    files[".bin"].write_bytes(bytes([65]) * files[".bin"].stat().st_size)
    files[".sums"].unlink() if text is None else files[".sums"].write_text(text)
    (tokens,), problems = opened()
    assert problems == [] and bytes(tokens.ids[:7]) == b"a named"
    assert files[".sums"].exists()


def test_a_copied_cache_is_no_damaged_one(tmp_path):
    files, opened = cached(tmp_path)
    for path in files.values():
        os.utime(path, (1, 1))
    assert opened()[1] == []


def test_a_large_cache_is_compared_beside_the_run(tmp_path, monkeypatch):
    files, opened = cached(tmp_path)
    monkeypatch.setattr(data_files, "_AT_START", 100)
    with compared([tmp_path / "a.txt", *files.values()]) as check:
        check()
    files[".bin"].write_bytes(bytes([65]) * files[".bin"].stat().st_size)
    assert opened()[1] == []
    reason = rf"{files['.bin']} has other bytes .* damaged: delete"
    with pytest.raises(ValueError, match=reason), compared([*files.values()]) as check:
        for _ in range(12_000):
            check()
            time.sleep(0.01)
