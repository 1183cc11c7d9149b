"""What a run does before its first step is shown on a terminal, and nowhere else."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from meshdsl.training.reporting.doing import doing


def console(**settings):
    return Console(file=io.StringIO(), width=60, **settings)


def test_a_terminal_shows_what_goes_on_and_keeps_nothing_of_it():
    terminal = console(force_terminal=True)
    with doing("compiling [the] step", console=terminal):
        pass
    written = terminal.file.getvalue()
    assert re.search(r"compiling \[the\] step.*\d:\d\d:\d\d", re.sub(r"\x1b\[[\d;]*m", "", written))
    assert written.endswith("\x1b[2K")  # the line is erased


@pytest.mark.parametrize(("quiet", "terminal"), [(True, True), (False, False)])
def test_others_get_nothing(quiet, terminal):
    out = console(force_terminal=terminal)
    with doing("compiling the step", quiet, out):
        pass
    assert out.file.getvalue() == ""


def test_an_error_of_the_block_passes():
    with pytest.raises(KeyError), doing("it", console=console(force_terminal=True)):
        raise KeyError


@pytest.mark.long
def test_a_run_says_in_order_what_it_does_before_its_first_step():
    """On a terminal of its own, as a person has one."""
    command = "train --model=gpt_mini --steps=1 --batch_size=2 --length=16 --eval_batches=1".split()
    own, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "meshdsl", *command],
        stdout=theirs,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(own, 1 << 16):
            written += part
    except OSError:  # Linux's way to say that the other end is closed
        pass
    assert process.wait() == 0
    said = ["reading the text", "planning the step", "compiling the step", "step 1/1"]
    text = written.decode()
    assert [text.find(words) for words in said] == sorted(text.find(words) for words in said)
    assert all(words in text for words in said)
