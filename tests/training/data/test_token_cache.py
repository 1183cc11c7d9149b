"""Which cache belongs to text files: that of the same bytes, whatever their sizes and times."""

import os
import shutil

import numpy as np
import pytest

from meshdsl.training.data import token_cache as room
from meshdsl.training.data.token_cache import token_cache
from meshdsl.training.data.token_files import TokenFile, write_token_file
from meshdsl.training.data.tokenizers import Bytes
from meshdsl.training.data.tokenizing import read_tokens

BEFORE, AFTER = b"a named dim " * 50, b"a split dim " * 50


def text_of(cache, *paths):
    problems = []
    (tokens,) = read_tokens(paths, Bytes(), problems, cache=cache)
    assert problems == []
    return bytes(tokens.ids)


def rewrite(path, text):
    """Changes a file in place, and sets its time of modification back."""
    was = path.stat()
    while True:  # until the clock of the file system has moved on
        path.write_bytes(text)
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        here = path.stat()
        if here.st_ctime_ns != was.st_ctime_ns:
            break
    assert (here.st_size, here.st_mtime_ns) == (was.st_size, was.st_mtime_ns)


def caches(folder):
    return {path.name for path in folder.glob("*.bin")}


def test_a_change_that_keeps_size_and_time_of_modification_is_seen(tmp_path):
    text, other, cache = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "cache"
    text.write_bytes(BEFORE)
    other.write_bytes(b"more")
    assert text_of(cache, text, other) == BEFORE + b"\0more\0"
    rewrite(text, AFTER)
    assert text_of(cache, text, other) == AFTER + b"\0more\0"
    rewrite(text, BEFORE)  # its cache is still there
    before = caches(cache)
    assert text_of(cache, text, other) == BEFORE + b"\0more\0"
    assert caches(cache) == before and len(before) == 2


def test_a_file_that_is_replaced_by_one_of_its_size_and_time_is_seen(tmp_path):
    text, other, cache = tmp_path / "a.txt", tmp_path / "other", tmp_path / "cache"
    text.write_bytes(BEFORE)
    assert text_of(cache, text) == BEFORE + b"\0"
    other.write_bytes(AFTER)
    shutil.copystat(text, other)
    while other.stat().st_ctime_ns == text.stat().st_ctime_ns:
        os.utime(other, ns=(text.stat().st_atime_ns, text.stat().st_mtime_ns))
    os.replace(other, text)
    assert text_of(cache, text) == AFTER + b"\0"


def test_known_files_are_not_read_again_and_touched_or_copied_ones_have_the_same_cache(
    tmp_path, monkeypatch
):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_bytes(BEFORE)
    text_of(cache, text)
    made = caches(cache)
    reads = []
    sums = room.all_sums
    monkeypatch.setattr(room, "all_sums", lambda paths: reads.append(paths) or sums(paths))
    text_of(cache, text)
    assert not reads
    os.utime(text, (1, 1))
    text_of(cache, text)
    text_of(cache, text)
    assert reads == [[text]]
    copy = tmp_path / "copy.txt"
    shutil.copyfile(text, copy)
    text_of(cache, copy)
    assert reads == [[text], [copy]] and caches(cache) == made


@pytest.mark.parametrize("key", ["", "../elsewhere.bin", "0" * 24 + ".bin", "\xff"])
def test_a_key_that_names_no_cache_is_made_again(tmp_path, key):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_bytes(BEFORE)
    text_of(cache, text)
    (path,) = cache.glob("*.key")
    name = path.read_text()
    path.write_bytes(key.encode("latin-1"))
    assert text_of(cache, text) == BEFORE + b"\0"
    assert path.read_text() == name


def test_a_file_that_changes_while_it_is_read_is_an_error_and_nothing_is_kept(tmp_path):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_bytes(BEFORE)

    def write(target, then):
        write_token_file(target, [np.frombuffer(text.read_bytes(), np.uint8)], "uint8")
        rewrite(text, then)

    with pytest.raises(ValueError) as error:
        token_cache(cache, [text], "bytes", lambda target: write(target, AFTER))
    assert str(error.value) == (
        f"{text} changed while it was read; start again when nothing writes to it"
    )
    rewrite(text, BEFORE)
    found = token_cache(
        cache,
        [text],
        "bytes",
        lambda target: write_token_file(target, [np.arange(3)], "uint8"),
    )
    assert list(TokenFile(found).ids) == [0, 1, 2]
