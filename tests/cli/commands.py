"""Commands of a test, run in its process: what they print, and that they succeed or refuse."""

from meshdsl.cli.main import run


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
