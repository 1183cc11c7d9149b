"""Which files are read, and what is wrong with them."""

import errno
import os
import re
from pathlib import Path

import pytest

from meshdsl.training.data import text_files


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
