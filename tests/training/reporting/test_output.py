"""A command whose output nobody reads any more goes on, with a buffer or without one."""

import io
import os
import sys

import pytest

from meshdsl.training.reporting.output import give, hush, tell


@pytest.fixture(params=[False, True], ids=["buffered", "unbuffered"])
def pipe(request):
    """Returns the reading end of a pipe, and a stream that writes to it as Python's own does."""
    reading, writing = os.pipe()
    raw = io.FileIO(writing, "w")
    stream = io.TextIOWrapper(
        raw if request.param else io.BufferedWriter(raw), write_through=request.param
    )
    yield reading, stream
    stream.close()


def test_what_nobody_reads_is_dropped(pipe):
    reading, stream = pipe
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        print("line", file=stream, flush=True)
    assert hush(stream)
    print("another", file=stream, flush=True)
    assert not hush(stream)


def test_what_somebody_reads_goes_on(pipe):
    reading, stream = pipe
    print("line", file=stream)
    assert not hush(stream)
    assert os.read(reading, 99) == b"line\n"
    os.close(reading)


def test_lines_are_told_until_nobody_reads(pipe, monkeypatch):
    reading, stream = pipe
    monkeypatch.setattr(sys, "stdout", stream)
    tell("one")
    assert os.read(reading, 99) == b"one\n"
    os.close(reading)
    tell("two")
    tell("three")


def test_a_result_that_nobody_reads_ends_the_command(pipe, monkeypatch):
    reading, stream = pipe
    monkeypatch.setattr(sys, "stdout", stream)
    give("one\n")
    assert os.read(reading, 99) == b"one\n"
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        give("two\n")
    assert hush(stream)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full disk at hand")
@pytest.mark.parametrize("buffered", [False, True])
def test_a_result_that_cannot_be_written_is_an_error(monkeypatch, buffered):
    raw = open("/dev/full", "wb", buffering=-1 if buffered else 0)  # noqa: SIM115
    with io.TextIOWrapper(raw, write_through=not buffered) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(ValueError, match="cannot write to standard output: No space left"):
            give("one\n")
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ValueError, match="it is closed"):
        give("one\n")
