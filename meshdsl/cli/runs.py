"""`meshdsl runs runs/*`: runs beside each other, the best first, and how their settings differ."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from rich.console import Console

from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.parsing.table import FLAGS
from meshdsl.reports.runs.reading import runs_below
from meshdsl.reports.runs.table import as_json, as_table, ranked, settings_table
from meshdsl.training.reporting.output import tell

_NO_FOLD = 10_000  # columns of what is no terminal: a line stays one


def main(values: flags.FlagValues, problems: Problems, places: Sequence[str] = ()) -> int:
    """Runs the command; returns its exit code.

    Args:
        places: folders of runs, or folders that have such folders in them; --workdir is one more.

    Raises:
        ValueError: a folder is not there, or has no run.
    """
    places = [*places, *([values.workdir] if values.workdir else [])]
    if not places:
        problems.add("say whose runs to list: meshdsl runs runs/first runs/second, or a folder")
    problems.check()
    runs = ranked(runs_below(places))
    defaults = {name: flag[0] for name, flag in FLAGS.items()}
    if values.json:
        tell(as_json(runs, defaults))
        return 0
    console = Console()
    console = console if console.is_terminal else Console(width=_NO_FOLD)
    console.print(as_table(runs, defaults))
    if settings := settings_table(runs, defaults, console.width):
        console.print()
        console.print(settings)
    return 0
