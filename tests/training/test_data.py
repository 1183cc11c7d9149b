"""Byte-level data: which files are read, how they are split, and in which order they come."""

import errno
import os
import re
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.training.data import (
    SEPARATOR,
    VOCABULARY,
    Arrays,
    ByteCorpus,
    ordered_batches,
    shuffled_batches,
    text_files,
)


def corpus_of(size: int) -> ByteCorpus:
    """A corpus whose windows can be told apart: little-endian 16-bit numbers, one after another."""
    return ByteCorpus(np.arange(size // 2 + 1, dtype="<u2").view(np.uint8)[:size])


def numbered(count: int) -> Arrays:
    return Arrays({"number": np.arange(count)})


def numbers(batches: list[dict[str, np.ndarray]]) -> list[int]:
    return np.concatenate([batch["number"] for batch in batches]).tolist()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)


def test_without_a_pattern_the_standard_library_is_the_text():
    files = text_files()
    assert files == text_files("") == text_files("  ")
    assert Path(os.__file__).resolve() in [file.resolve() for file in files]
    assert all(file.suffix == ".py" and file.stat().st_size > 0 for file in files)
    assert not any({"site-packages", "__pycache__"} & set(file.parts) for file in files)


def test_patterns_reach_folders_below_and_several_are_separated_by_commas(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path / "a", top="x")
    write(tmp_path / "a" / "b", deep="x")
    (tmp_path / "notes.md").write_text("x")
    found = text_files(f"{tmp_path}/**/*.txt, {tmp_path}/*.md")
    assert [str(file.relative_to(tmp_path)) for file in found] == [
        "a/b/deep.txt",
        "a/top.txt",
        "notes.md",
    ]


def test_files_are_sorted_and_listed_once_whatever_the_order_of_patterns(tmp_path, monkeypatch):
    write(tmp_path, b="x", a="x", c="x")
    monkeypatch.chdir(tmp_path)
    names = [file.name for file in text_files(f"c.txt,*.txt,{tmp_path}/a.txt")]
    assert names == ["a.txt", "b.txt", "c.txt"]


def test_a_file_may_be_named_with_characters_that_are_wildcards(tmp_path):
    (tmp_path / "notes[1].txt").write_text("x")
    assert text_files(f"{tmp_path}/notes[1].txt") == [tmp_path / "notes[1].txt"]


def test_empty_files_among_others_are_passed_over(tmp_path):
    write(tmp_path, a="x", b="")
    assert text_files(f"{tmp_path}/*.txt") == [tmp_path / "a.txt"]


def test_everything_wrong_with_the_files_is_reported_at_once(tmp_path, monkeypatch):
    write(tmp_path, good="x", empty="", hollow="")
    (tmp_path / "dangling.log").symlink_to(tmp_path / "gone")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        text_files("good.txt,[eh]*.txt,corpus/**/*.txt,*.md,folder,*.log,pipe")
    assert str(error.value) == (
        "cannot read the text to train on (6 problems)\n"
        "\n"
        "  1. `[eh]*.txt` matches only empty files, 2 in all\n"
        f"  2. `corpus/**/*.txt` matches no file; looked in {tmp_path}/corpus, "
        "which does not exist\n"
        f"  3. `*.md` matches no file; looked in {tmp_path}\n"
        "  4. `folder` is a folder; write `folder/**/*` for all files in it\n"
        f"  5. {tmp_path}/dangling.log cannot be read: No such file or directory\n"
        f"  6. {tmp_path}/pipe cannot be read: not a regular file\n"
        "\n"
        "  Write paths with * (within a folder), ** (all folders below) and ?, as in\n"
        "    --data='corpus/**/*.txt,notes/*.md'\n"
        "  Without --data, the sources of Python's standard library are used."
    )


def test_a_file_without_permission_to_read_is_reported(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    write(tmp_path, secret="x")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"secret\.txt cannot be read: Permission denied"):
        text_files(f"{tmp_path}/*.txt")


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path):
    for number in range(13):
        (tmp_path / f"{number:02}.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"\(13 problems\)") as error:
        text_files(f"{tmp_path}/*.txt")
    assert str(error.value).count("cannot be read") == 10
    assert "  ... and 3 more" in str(error.value)


def test_a_python_without_sources_says_where_they_were_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=rf"matches no file; looked in {re.escape(str(tmp_path))}"):
        text_files()


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


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 60), data=st.data(), seed=st.integers(0, 2**40))
def test_each_epoch_visits_every_example_once(count, data, seed):
    batch_size = data.draw(st.integers(1, count))
    batches = islice(
        shuffled_batches(numbered(count), batch_size, seed), 3 * count // batch_size + 1
    )
    epochs = np.reshape(numbers(list(batches))[: 3 * count], (3, count))
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))


def test_every_epoch_has_an_order_of_its_own():
    first, second = np.reshape(
        numbers(list(islice(shuffled_batches(numbered(50), 10, 0), 10))), (2, 50)
    )
    assert first.tolist() != second.tolist()


def test_one_seed_gives_one_order_and_another_seed_another():
    def order(seed: int) -> list[int]:
        return numbers(list(islice(shuffled_batches(numbered(100), 8, seed), 30)))

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_the_order_is_the_same_in_another_process():
    code = (
        "from meshdsl.training.data import Arrays, shuffled_batches\n"
        "import numpy as np\n"
        "print(next(shuffled_batches(Arrays({'n': np.arange(1000)}), 5, 11))['n'].tolist())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=60,
    )
    here = next(shuffled_batches(Arrays({"n": np.arange(1000)}), 5, 11))["n"].tolist()
    assert run.stdout.strip() == str(here)
    assert run.stderr == ""


def test_a_stored_state_resumes_at_the_exact_batch():
    batches = shuffled_batches(numbered(30), 4, seed=5)
    list(islice(batches, 10))
    state = batches.get_state()
    expected = numbers(list(islice(batches, 5)))
    resumed = shuffled_batches(numbered(30), 4, seed=5)
    resumed.set_state(state)
    assert numbers(list(islice(resumed, 5))) == expected


def test_held_out_batches_come_in_order_and_the_same_on_every_pass():
    batches = ordered_batches(numbered(23), 5)
    assert numbers(list(batches)) == numbers(list(batches)) == list(range(20))


@given(examples=st.integers(1, 200), data=st.data(), count=st.integers(1, 30))
@settings(deadline=None, max_examples=25)
def test_a_limited_pass_is_spread_evenly_over_the_examples(examples, data, count):
    batch_size = data.draw(st.integers(1, examples))
    batches = list(ordered_batches(numbered(examples), batch_size, count))
    assert len(batches) == min(count, examples // batch_size)
    chosen = numbers(batches)
    gaps = np.diff([*chosen, examples])
    assert chosen[0] == 0
    assert (gaps >= 1).all()
    assert gaps.max() - gaps.min() <= 1


def test_reading_batches_starts_no_thread():
    before = threading.active_count()
    batches = shuffled_batches(numbered(30), 4, seed=5)
    next(batches)
    list(ordered_batches(numbered(30), 4))
    assert threading.active_count() == before


def test_arrays_are_batched_row_by_row():
    digits = Arrays({"image": np.ones((3, 8, 8)), "label": np.arange(3)})
    batch = digits[np.array([2, 1])]
    assert batch["image"].shape == (2, 8, 8)
    assert batch["label"].tolist() == [2, 1]


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"one row for each example, got image 1,797, label 10"):
        Arrays({"image": np.zeros((1797, 64)), "label": np.zeros(10)})
    with pytest.raises(ValueError, match=r"one row for each example, got none"):
        Arrays({})


def test_numbers_out_of_range_are_refused_by_name():
    with pytest.raises(ValueError, match=r"batch_size must be at least 1, got 0"):
        shuffled_batches(numbered(5), 0, seed=0)
    with pytest.raises(ValueError, match=r"seed must be at least 0, got -1"):
        shuffled_batches(numbered(5), 2, seed=-1)
    with pytest.raises(ValueError, match=r"count must be at least 1, got 0"):
        ordered_batches(numbered(5), 2, count=0)
    with pytest.raises(ValueError, match=r"length must be at least 1, got 0"):
        corpus_of(100).split(0, batch_size=1)
    with pytest.raises(ValueError, match=r"held_out must be at least 2, got 1"):
        corpus_of(100).split(4, batch_size=1, held_out=1)


@pytest.mark.parametrize(
    "read", [lambda s: shuffled_batches(s, 6, 0), lambda s: ordered_batches(s, 6)]
)
def test_fewer_examples_than_one_batch_are_refused(read):
    message = r"batch_size=6 needs at least 6 examples, there are only 5"
    with pytest.raises(ValueError, match=message):
        read(numbered(5))
