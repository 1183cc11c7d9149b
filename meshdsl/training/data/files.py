"""Which files hold the data: names with wildcards, and what is wrong with them.

Guarantees:
    Files are found in the order of their absolute paths, each once in what one pattern matches.
    One error lists all problems: files that cannot be read, and patterns that match nothing.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from meshdsl.training.data.checks import numbered


def text_files(pattern: str | None = None) -> list[Path]:
    """Finds the text to train on: non-empty, readable files, sorted by their absolute path.

    Args:
        pattern: paths with `*` (within a folder), `**` (all folders below) and `?`; commas separate
            several. None or blank: the `*.py` files of Python's standard library, without
            `site-packages`. These differ between Python versions.

    Raises:
        ValueError: a pattern matches nothing or only empty files, or a file cannot be read. All
            such problems are listed.
    """
    patterns = [part.strip() for part in (pattern or "").split(",") if part.strip()]
    matched = {path for paths in find(patterns) for path in paths}
    return sorted(matched, key=Path.as_posix)


def find(patterns: Sequence[str]) -> list[list[Path]]:
    """Finds what each pattern matches, as `text_files` does; without any, the standard library.

    The index of a token file comes with it: `.idx` files are left out.

    Raises:
        ValueError: as of `text_files`.
    """
    matches: list[list[Path]] = []
    problems: list[str] = []
    for name, paths in [(p, matching(p)) for p in patterns] or [_standard_library()]:
        sizes = {}
        for path in paths:
            try:
                sizes[path] = _readable_size(path)
            except OSError as error:
                problems.append(f"{path} cannot be read: {error.strerror}")
        if not paths:
            problems.append(_no_match(name))
        elif not any(sizes.values()) and len(sizes) == len(paths):
            problems.append(f"`{name}` matches only empty files, {len(paths)} in all")
        if paths and all(path.suffix == ".idx" for path in paths):
            problems.append(f"`{name}` matches only indices of token files: name the .bin files")
        usable = [path for path, size in sizes.items() if size and path.suffix != ".idx"]
        matches.append(sorted(usable, key=Path.as_posix))
    if problems:
        raise ValueError(_describe(problems))
    return matches


def in_utf8(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that are UTF-8, and those that cannot be read.

    Python's standard library has a few in other encodings, to test its own parser.
    """

    def is_utf8(path: Path) -> bool:
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError:
            return False
        except OSError:
            return True
        return True

    return [path for path in paths if is_utf8(path)]


def matching(pattern: str) -> list[Path]:
    """Returns the files that a pattern matches, whether or not they can be read."""
    pattern = os.path.expanduser(pattern)
    literal = os.path.lexists(pattern)  # a name may contain what would be a wildcard: notes[1].txt
    paths = [pattern] if literal else glob.glob(pattern, recursive=True)
    return [Path(os.path.abspath(path)) for path in paths if not os.path.isdir(path)]


def _standard_library() -> tuple[str, list[Path]]:
    """Returns the pattern that stands for the standard library's sources, and what it matches."""
    root = sysconfig.get_paths()["stdlib"]
    paths = []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - {"site-packages", "dist-packages", "__pycache__"}
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return f"{root}/**/*.py", paths


def _readable_size(path: Path) -> int:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def _no_match(pattern: str) -> str:
    """Returns the message for a pattern without matches; it names the folder that was searched."""
    path = Path(os.path.expanduser(pattern)).absolute()
    if path.is_dir():
        return f"`{pattern}` is a folder; write `{pattern.rstrip('/')}/**/*` for all files in it"
    fixed = [part for part in path.parents if not glob.has_magic(str(part))]
    exists = "" if fixed[0].is_dir() else ", which does not exist"
    return f"`{pattern}` matches no file; looked in {fixed[0]}{exists}"


def _describe(problems: list[str]) -> str:
    return "\n".join(
        [
            numbered("cannot read the text to train on", problems),
            "",
            "  Write paths with * (within a folder), ** (all folders below) and ?, as in",
            "    --data='corpus/**/*.txt,notes/*.md'",
            "  Without --data, the sources of Python's standard library are used.",
        ]
    )
