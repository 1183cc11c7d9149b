"""`meshdsl plot runs/* --out=curves.svg`: loss, norms, speed and memory of runs, over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from meshdsl.cli.mistakes.problems import Problems
from meshdsl.reports.runs.curves import KINDS, draw
from meshdsl.reports.runs.reading import runs_below
from meshdsl.training.reporting.output import tell


def main(values: flags.FlagValues, problems: Problems, places: Sequence[str] = ()) -> int:
    """Runs the command; returns its exit code.

    Args:
        places: folders of runs, or folders that have such folders in them; --workdir is one more.

    Raises:
        ValueError: a folder is not there, or has no run; or the file cannot be written.
    """
    places = [*places, *([values.workdir] if values.workdir else [])]
    if not places:
        problems.add("say whose curves to draw: meshdsl plot runs/first runs/second, or a folder")
    if values.out is None:
        problems.add(
            f"--out says where to draw, as in --out=curves.svg; it ends in {', '.join(KINDS)}"
        )
    elif Path(values.out).suffix not in KINDS:
        problems.add(f"--out: {values.out} must end in {', '.join(KINDS)}")
    problems.check()
    runs = runs_below(places)
    draw(runs, Path(values.out))
    tell(f"{len(runs)} run{'' if len(runs) == 1 else 's'} drawn in {values.out}")
    return 0
