"""Calibrated hardware on the command line: `--hardware=mine.json` is for the machine it is from."""

from __future__ import annotations

import warnings

from absl import flags

from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.layouts.calibration import calibration_of
from meshdsl.layouts.machine import Machine


def check_machine(values: flags.FlagValues, problems: Problems, device_kind: str = "") -> None:
    """Adds to `problems` what differs between this machine and that of `--hardware=mine.json`.

    With `--override` it is a warning. The devices are not looked for: explaining needs none.

    Args:
        device_kind: the name of the devices in their driver, if it is known.
    """
    if isinstance(values.hardware, Mistake):
        return
    calibration = calibration_of(values.hardware)
    if calibration is None:
        return
    differences = calibration.machine.differences(Machine.here(device_kind=device_kind))
    if not differences:
        return
    text = f"{values.hardware} is of another machine or jaxlib ({'; '.join(differences)})"
    if values.override is True:
        warnings.warn(f"{text}: times are those measured there", stacklevel=2)
    else:
        problems.add(
            f"--hardware: {text}. `meshdsl calibrate --out=here.json` measures this one; "
            "--override takes the times measured there"
        )
