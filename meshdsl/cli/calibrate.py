"""`meshdsl calibrate`: measures the devices at hand, for `--hardware=mine.json`."""

from __future__ import annotations

import os
import time

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.layouts.calibration import SUFFIX, Calibration, read
from meshdsl.training.exit_codes import UNFINISHED
from meshdsl.training.reporting.output import tell


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command; returns its exit code: 75 if its time was over before its work.

    Raises:
        ValueError: the file cannot be read or written, or is of another machine or jaxlib.
    """
    if not values.out:
        problems.add(f"--out says where to, as in --out=mine{SUFFIX}")
    elif not values.out.endswith(SUFFIX):
        problems.add(f"--out: {values.out} needs the ending {SUFFIX}, by which --hardware knows it")
    if not isinstance(values.minutes, Mistake) and not values.minutes:
        problems.add("--minutes: needs more than 0")
    problems.check()
    jobs.use_host_devices(values.host_devices)
    import jax

    from meshdsl.lowering.backends.jax.calibrating.measuring import begun, measured, missing

    devices, path = jax.devices(), values.out
    calibration = begun(devices)
    if os.path.exists(path):
        calibration = _resumed(path, calibration)
    calibration.write(path)  # an error of the disk is better known before than after
    end = time.monotonic() + 60 * values.minutes
    tell(f"measuring {calibration.machine}", error=True)
    for progress in measured(calibration, devices, lambda: time.monotonic() > end):
        calibration = progress.calibration
        calibration.write(path)
        tell(f"{progress.family} is measured, {progress.left} to go", error=True)
    if not calibration.lacking:
        _show(read(path))
    if left := missing(calibration):
        tell(f"{len(left)} families are left: the same command goes on", error=True)
        return UNFINISHED
    tell(f"{path} is written: use it as --hardware={path}", error=True)
    return 0


def _resumed(path: str, here: Calibration) -> Calibration:
    """Returns the calibration of a file that is to be completed.

    Raises:
        ValueError: it cannot be read, or is of another machine or jaxlib.
    """
    begun = read(path)
    differences = begun.machine.differences(here.machine)
    if differences:
        lines = [
            f"--out: {path} is of another machine or jaxlib; give another file, or remove it",
            *differences,
        ]
        raise ValueError("\n  ".join(lines))
    return begun


def _show(calibration: Calibration) -> None:
    from rich.console import Console

    from meshdsl.reports.calibration import report

    console = Console()
    (console if console.is_terminal else Console(width=160)).print(report(calibration))
