"""Store: the results of a sweep in a folder, so that an interrupted one goes on where it was.

`results.jsonl` has one line of JSON for every candidate that is done, and for every round of
measured steps; each has the key of its candidate (see `digest`). A line is written in one call,
and a line that an earlier process did not finish is removed. One process at a time locks the
folder; its exit unlocks the folder in any case.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from meshdsl.reports.sweeps.result import Result

FILE = "results.jsonl"
PAGES = "pages"


def unwritable(folder: Path, error: OSError) -> ValueError:
    """Returns what to raise where a folder cannot be written to."""
    reason = (error.strerror or "it cannot be written").lower()
    return ValueError(f"cannot write results to {folder}: {reason}")


class Store:
    """The results in a folder; closed by its with-block.

    Attributes:
        results: by key.
        rounds: by key, the seconds of the steps of each round.

    Raises:
        ValueError: the folder cannot be written to, or another process holds it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self.results: dict[str, Result] = {}
        self.rounds: dict[str, list[list[float]]] = {}
        try:
            (self.folder / PAGES).mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / FILE).open("a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another sweep is at work in {self.folder}") from error
        except OSError as error:
            raise unwritable(self.folder, error) from error
        for line in self._whole_lines():
            self._take(line)

    def add(self, key: str, result: Result) -> None:
        """Writes the result of a candidate; it has reached the system on return."""
        self.results[key] = result
        self._write({"key": key, "result": json.loads(result.as_json())})

    def add_round(self, key: str, seconds: Sequence[float]) -> None:
        """Writes the seconds of a round of steps."""
        self.rounds.setdefault(key, []).append([*seconds])
        self._write({"key": key, "round": [*seconds]})

    def known(self, key: str) -> Result | None:
        """Returns the result of a key, if there is one that can be used again."""
        result = self.results.get(key)
        if result is None or result.passing:
            return None
        return None if result.page and not (self.folder / result.page).is_file() else result

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        try:
            if self._file.write(data) != len(data):  # the next process removes the unfinished line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _whole_lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        complete, newline, rest = self._file.read().rpartition(b"\n")
        if rest:
            self._file.truncate(len(complete) + len(newline))
        yield from complete.splitlines()

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if "round" in entry:
                self.rounds.setdefault(entry["key"], []).append(entry["round"])
            else:
                self.results[entry["key"]] = Result.of_json(entry["result"])
        except (ValueError, TypeError, KeyError):
            return  # of another version: it is measured again

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
