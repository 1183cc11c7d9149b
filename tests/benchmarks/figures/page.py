"""The page: `BENCHMARKS.md` as text, from the table, the records and the notes."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.figures.records import Record, digest, read
from tests.benchmarks.figures.table import ROOT, SECTIONS, Benchmark

PAGE = ROOT / "BENCHMARKS.md"
NOTES = Path(__file__).parent / "notes"
HELD_BY_TESTS = "held_by_tests"  # the note of what tests measure

_START = """\
# Benchmarks

What was measured. Figures of the script have their command, date, commit and machine; notes by hand
have a date and a commit. Tests never assert speed.

This page is made: do not edit it. `python -m tests.benchmarks.figures --run=call_time` measures,
records, and writes the page anew. `--run=all` does so for all that can run on this machine. Without
flags the page is only written. A benchmark that has changed since its last run says so. Notes are
written by hand, each with its date and commit.
"""
_NEVER_RUN = "It has not been run by the script yet. Its notes have what was measured by hand."
_CHANGED = " The benchmark's code has changed since."


def text() -> str:
    """Returns the page."""
    parts = [_START]
    for title, benchmarks in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(benchmark) for benchmark in benchmarks]
    parts.append(f"## Held by tests\n\n{_note(HELD_BY_TESTS)}")
    return "\n".join(parts)


def _entry(benchmark: Benchmark) -> str:
    """Returns what the page says of a benchmark."""
    record = read(benchmark.name)
    lines = [f"### {benchmark.title}", "", benchmark.about, ""]
    lines += ["```bash", *benchmark.commands, "```", ""]
    lines += [_stamp(record, benchmark) if record else _NEVER_RUN, ""]
    if record:
        output = record.output.splitlines()
        out = len(output) - benchmark.lines
        first = [f"... (the first {out} lines are in the record)"] if out > 0 else []
        lines += ["```text", *first, *output[-benchmark.lines :], "```", ""]
    if note := _note(benchmark.name):
        summary = "Notes, and what was measured before"
        lines += [f"<details><summary>{summary}</summary>", "", note, "</details>", ""]
    return "\n".join(lines)


def _stamp(record: Record, benchmark: Benchmark) -> str:
    """Returns when, where and of what a record is."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    changed = "" if record.source == digest(benchmark) else _CHANGED
    return (
        f"*{record.date}, commit {record.commit}, {record.seconds:,.0f} s "
        f"({record.processor_seconds:,.0f} s of processor time); {record.machine}; {versions}.*"
        f"{changed}"
    )


def _note(name: str) -> str:
    file = NOTES / f"{name}.md"
    return file.read_text() if file.exists() else ""
