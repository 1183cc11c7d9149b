"""A digest tells steps apart that differ in anything, and is the same in every process."""

import subprocess
import sys

import numpy as np
import pytest

import meshdsl as md
from meshdsl.reports.sweeps.digest import digest, key

CODE = """
import meshdsl as md
from tests.reports.sweeps.test_digest import of
print(of())
"""


def of(size=4, scale=2.0, datum=1.0, dtype="float32", over="row", facts=("plan",)):
    """Returns the digest of a small function."""
    row, column = md.dims(row=size, column=3)
    table = md.named(np.array([1.0, 2.0, datum], np.float32), [column])

    def function(x):
        return md.map(lambda part: part * scale, x, dim=over), md.cast(x, "float32") + table

    return digest(md.jit(function).trace(md.spec([row, column], dtype)), *facts)


def test_it_is_the_same_in_another_process():
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.split() == [of()]


@pytest.mark.parametrize(
    "change",
    [
        {"size": 5},
        {"scale": 3.0},
        {"datum": 1.5},
        {"dtype": "bfloat16"},
        {"over": "column"},
        {"facts": ("run",)},
        {"facts": ("plan", "more")},
    ],
)
def test_it_differs_with_all_that_matters(change):
    assert of() == of() != of(**change)


def test_a_key_is_for_a_step_and_a_candidate():
    keys = {key(step, one) for step in ("a", "b") for one in ("data:2 | x:data", "data:4 | x:data")}
    assert len(keys) == 4
    assert all(len(one) == 16 for one in keys)
