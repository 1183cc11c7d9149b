"""A corpus: from what `--data` says to examples."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.training.data import (
    Corpus,
    DocumentWindows,
    Mixture,
    PackedRows,
    load_tokenizer,
    parse_ratios,
    shuffled_batches,
    text_files,
    write_token_file,
)
from tests.training.data.files import write_parquet, write_tokenizer


def write_texts(folder, count=40, seed=0):
    """Writes documents that can be told apart: each is a run of one letter pair of its own."""
    draw = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    for number in range(count):
        text = bytes([1 + number // 16, 100 + number % 16]) * int(draw.integers(5, 60))
        (folder / f"{number:03}.txt").write_bytes(text)
    return f"{folder}/*.txt"


@pytest.mark.parametrize("cached", [False, True])
def test_bytes_without_ratios_are_windows_of_the_files_each_ended_by_a_zero(tmp_path, cached):
    pattern = write_texts(tmp_path / "text")
    cache = tmp_path / "cache" if cached else None
    found = Corpus.read(pattern, 256, cache=cache).split(15, batch_size=2)
    text = b"".join(file.read_bytes() + b"\0" for file in text_files(pattern))
    windows = np.frombuffer(text[: len(text) // 16 * 16], np.uint8).reshape(-1, 16)
    is_held_out = np.arange(len(windows)) % 20 == 19
    expected = windows[~is_held_out], windows[is_held_out]
    for ours, theirs in zip((found.train, found.valid), expected, strict=True):
        assert len(ours) == len(theirs)
        rows = np.random.default_rng(0).permutation(len(ours))
        np.testing.assert_array_equal(ours[rows]["tokens"], theirs[rows, :-1])
        np.testing.assert_array_equal(ours[rows]["targets"], theirs[rows, 1:])
    assert found.test is None


@settings(max_examples=20)
@given(ratios=st.sampled_from(["8,1,1", "1,1,1", "3,1", "1,0,1", "1,0,0"]), packing=st.booleans())
def test_no_document_is_in_two_splits(tmp_path_factory, ratios, packing):
    folder = tmp_path_factory.mktemp("corpus")
    corpus = Corpus.read(write_texts(folder), 256)
    assert corpus.files == 40
    ratios = parse_ratios(ratios)
    splits = corpus.split(8, batch_size=1, ratios=ratios, packing=packing)
    seen = []
    for ratio, source in zip(ratios, (splits.train, splits.valid, splits.test), strict=True):
        assert (source is None) == (ratio == 0)
        if source is not None:
            assert isinstance(source, PackedRows if packing else DocumentWindows)
            batch = source[np.arange(len(source))]
            pairs = zip(batch["tokens"].ravel(), batch["targets"].ravel(), strict=True)
            seen.append({(min(p), max(p)) for p in pairs if 0 < min(p) < 100 <= max(p)})
            assert seen[-1]
    assert sum(map(len, seen)) == len(set.union(*seen))
    if packing:
        assert len(set.union(*seen)) == 40


def test_a_mixture_takes_files_by_weight(tmp_path):
    first = write_texts(tmp_path / "a", 30, seed=1)
    write_token_file(tmp_path / "b.bin", [np.full(50, 77)] * 40)
    corpus = Corpus.read(f"{first}:3,{tmp_path}/b.bin:1", 256)
    assert (corpus.files, corpus.unit) == (31, "token")
    splits = corpus.split(9, batch_size=4)
    assert isinstance(splits.train, Mixture)
    assert splits.train.weights == (3, 1)
    batches = list(islice(shuffled_batches(splits.train, 20, 0), 10))
    of_second = np.concatenate([batch["tokens"] for batch in batches]) == 77
    assert np.count_nonzero(of_second.all(1)) == 50


def test_files_of_a_pattern_are_read_by_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json"))
    write_parquet(tmp_path / "a.parquet", body=["named dim of a tensor"] * 30)
    corpus = Corpus.read(f"{tmp_path}/*.parquet", 6, tokenizer, column="body")
    assert (corpus.size, corpus.unit, corpus.files) == (180, "token", 1)
    splits = corpus.split(5, batch_size=1, packing=True)
    batch = splits.train[np.array([0])]
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 4]]
    assert batch["targets"].tolist() == [[2, 3, 0, 4, 5]]


def test_caches_are_apart_from_the_files_of_data(tmp_path):
    (tmp_path / "a.txt").write_text("a named dim " * 50)
    corpus = Corpus.read(f"{tmp_path}/a.txt", 256, cache=tmp_path / "cache")
    assert corpus.paths == (tmp_path / "a.txt",)
    tokens, index = corpus.caches
    assert (tokens.parent, index) == (tmp_path / "cache", tokens.with_suffix(".idx"))
    again = Corpus.read(str(tokens), 256)
    assert (again.paths, again.caches) == ((tokens, index), ())


def test_a_tokenizer_reads_what_is_utf8_of_the_standard_library(tmp_path, monkeypatch):
    """Some of its files are in other encodings, which bytes may be."""
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "one.py").write_text("a named dim\n" * 40)
    (tmp_path / "koi8.py").write_bytes(b"# \xcf\xd4\n")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    corpus = Corpus.read(None, 256, tokenizer)
    assert [path.name for path in corpus.paths] == ["one.py"]
    assert len(Corpus.read(None, 256).paths) == 2
    with pytest.raises(ValueError, match=r"koi8\.py: byte 2 is not UTF-8"):
        Corpus.read(f"{tmp_path}/*.py", 256, tokenizer)


def test_everything_wrong_with_files_is_told_at_once(tmp_path):
    write_token_file(tmp_path / "a.bin", [np.array([1, 2, 900])])
    write_token_file(tmp_path / "b.bin", [np.arange(3)])
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"`.*/b\.bin` matches only empty files, 1 in all"):
        Corpus.read(f"{tmp_path}/a.bin:1,{tmp_path}/b.bin:2", 256)
    (tmp_path / "b.bin").write_bytes(b"?")
    with pytest.raises(ValueError) as error:
        Corpus.read(f"{tmp_path}/a.bin:1,{tmp_path}/b.bin:2", 256)
    assert str(error.value) == (
        "cannot read the data (2 problems)\n"
        "\n"
        f"  1. {tmp_path}/a.bin: token 2 has the id 900, outside of the vocabulary of 256; the "
        "data was made with another tokenizer, or the file is damaged\n"
        f"  2. {tmp_path}/b.bin is cut short: it has 1 bytes, and its index tells of 12 (3 tokens "
        "of int32)"
    )


def test_an_index_alone_is_no_data(tmp_path):
    write_token_file(tmp_path / "a.bin", [np.arange(3)])
    with pytest.raises(ValueError, match=r"`.*/a\.idx` matches only indices of token files: name"):
        Corpus.read(f"{tmp_path}/a.idx", 256)
    assert Corpus.read(f"{tmp_path}/a.*", 256).size == 3


def test_too_little_of_anything_is_told_at_once(tmp_path):
    write_token_file(tmp_path / "a.bin", [np.full(30, 1)] * 40)
    write_token_file(tmp_path / "b.bin", [np.full(30, 2)])
    corpus = Corpus.read(f"{tmp_path}/a.bin:1,{tmp_path}/b.bin:2", 256)
    with pytest.raises(ValueError) as error:
        corpus.split(9, batch_size=10, ratios=parse_ratios("8,1,1"), packing=True)
    assert str(error.value) == (
        "the text is too short: it has 1,230 tokens in 41 documents (2 problems)\n"
        "\n"
        "  1. `" + f"{tmp_path}/b.bin" + "` has no example for valid\n"
        "  2. `" + f"{tmp_path}/b.bin" + "` has no example for test\n"
        "\n"
        "  Give more text, or a smaller batch_size or length, or a larger part for that split."
    )
    with pytest.raises(ValueError) as error:
        Corpus.read(f"{tmp_path}/a.bin", 256).split(19, batch_size=5)
    assert str(error.value) == (
        "the text is too short: it has 1,200 tokens in 40 documents (1 problem)\n"
        "\n"
        "  1. there are 3 windows of 19 tokens for valid, fewer than batch_size=5\n"
        "\n"
        "  Give more text, or a smaller batch_size or length."
    )


def test_numbers_out_of_range_are_refused_by_name(tmp_path):
    write_token_file(tmp_path / "a.bin", [np.arange(30)])
    corpus = Corpus.read(f"{tmp_path}/a.bin", 256)
    with pytest.raises(ValueError, match=r"length must be at least 1, got 0"):
        corpus.split(0, batch_size=1)
    with pytest.raises(ValueError, match=r"batch_size must be at least 1, got 0"):
        corpus.split(1, batch_size=0)


def test_a_fingerprint_tells_other_data_and_other_weights(tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        write_token_file(tmp_path / f"{name}.bin", [np.full(30, value)])
    names = [f"{tmp_path}/{name}.bin" for name in "ab"]
    given = [names[0], names[1], f"{names[0]}:1,{names[1]}:2", f"{names[0]}:2,{names[1]}:2"]
    found = [Corpus.read(data, 256).fingerprint() for data in given]
    assert len(set(found)) == 4
    assert found == [Corpus.read(data, 256).fingerprint() for data in given]


def test_the_ids_that_are_checked_at_start_are_shared_among_all_files(tmp_path):
    for name in "abcd":
        ids = np.arange(100, dtype=np.uint16)
        ids[30] = 999
        write_token_file(tmp_path / f"{name}.bin", [ids])
    data = f"{tmp_path}/[ab].bin:1,{tmp_path}/[cd].bin:1"
    assert Corpus.read(data, 999, checked=4 * 30).files == 4
    with pytest.raises(ValueError) as error:
        Corpus.read(data, 999, checked=4 * 31)
    assert str(error.value).count("token 30 has the id 999") == 4
