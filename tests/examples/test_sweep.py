"""The example knows what layouts send, as arithmetic tells, and ranks them by their time."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sweep.py"
SMALL = ["--batch=32", "--embed=64", "--layers=2"]
LAYOUTS = ["--layout=batch:data", "--layout=batch:data;d_ff:model"]


def swept(tmp_path, *arguments):
    """Returns the rows of the table by mesh and layout, in order, and what is printed."""
    out = tmp_path / "sweep.csv"
    command = [sys.executable, str(EXAMPLE), *SMALL, *LAYOUTS, f"--out={out}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with out.open() as file:
        return {(row["mesh"], row["layout"]): row for row in csv.DictReader(file)}, done.stdout


def test_what_each_layout_sends_is_known_and_what_does_not_fit_is_told(tmp_path):
    rows, printed = swept(tmp_path)
    parameters = 4 * 2 * 2 * 64 * 256  # bytes
    stream = 4 * 16 * 64  # of half of the batch
    layers = 2 * 2  # forward and backward
    sent = {
        ("data:2,model:4", "batch:data;d_ff:model"): parameters / 4 + 2 * 3 / 4 * stream * layers,
        ("data:2,model:4", "batch:data"): parameters,
        ("data:8", "batch:data"): 2 * 7 / 8 * parameters,
    }
    assert {key: float(row["MiB sent"]) for key, row in rows.items()} == pytest.approx(
        {key: value / 2**20 for key, value in sent.items()}, rel=1e-3
    )
    times = [float(row["ms"]) for row in rows.values()]
    assert times == sorted(times) and times[0] > 0
    assert "ms measured" not in printed and "data:8 | batch:data;d_ff:model" in printed
    assert "`d_ff:model` names mesh axis `model`, but the mesh has `data`" in printed


@pytest.mark.long
def test_steps_are_measured_where_that_is_asked_for(tmp_path):
    rows, _ = swept(tmp_path, "--run", "--host_devices=8")
    times = [float(row["ms measured"]) for row in rows.values()]
    assert len(times) == 3 and times == sorted(times) and times[0] > 0
