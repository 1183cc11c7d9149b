"""A small calibration with round figures, for tests."""

from dataclasses import replace

from meshdsl.layouts.calibration import Calibration
from meshdsl.layouts.machine import Machine

MACHINE = Machine("cpu", "cpu", 8, 2, "Fast CPU", "0.0.1", "somewhere")
SECONDS = {
    "products/float32/rows": {(1, 64, 64, 64): 1e-5, (1, 256, 256, 256): 1e-4},
    "elementwise": {(4096,): 1e-6, (2**20,): 1e-4},
    "all_reduce": {(2, 2**10): 2e-5, (2, 2**20): 2e-4, (8, 2**10): 4e-5, (8, 2**20): 4e-4},
}


def be_here(monkeypatch):
    """Makes this machine that of the small calibration, but for what is known of its devices."""
    monkeypatch.setattr(Machine, "here", staticmethod(lambda **known: replace(MACHINE, **known)))


def small(**families):
    """Returns it, with further families."""
    seconds = {**SECONDS, **families}
    return Calibration(MACHINE, "2026-01-01", "processor", 2**30, seconds, {"all_reduce": 0.9})


def written(folder, **families):
    """Writes it to a folder, and returns the path."""
    path = str(folder / "mine.json")
    small(**families).write(path)
    return path
