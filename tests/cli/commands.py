"""Commands of a test, run in its process: what they print, and that they succeed or refuse."""

import os
import sys

import pytest

from meshdsl.cli.main import run

needs_full_disk = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="the system has no full disk at hand"
)


def explained(capsys, *arguments):
    """Returns what `meshdsl explain` prints; it must succeed without a warning."""
    code = run(["explain", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def refused(capsys, *arguments):
    """Returns the message by which `meshdsl explain` refuses; it must print nothing else."""
    code = run(["explain", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    return captured.err


def check_standard_output(command, monkeypatch):
    """Checks that a full disk is an error of a command, and a closed pipe is none.

    Args:
        command: runs it with `--out=-`; returns its exit code, its output and its errors.
    """
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        code, _, errors = command()
    assert code == 2 and "cannot write to standard output: No space left on device" in errors
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        code, _, errors = command()
    assert code == 0 and "rror" not in errors and "cannot" not in errors
