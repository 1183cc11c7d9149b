"""The table of bytes on the wire, by the real TPU compiler where it is installed."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.benchmarks.gspmd_bytes import Compiled, ratio, show, title
from tests.benchmarks.pairs import PAIRS

PAIR = PAIRS["mlp_2d"]


def compiled(mib, seconds=1.5, gib=2):
    return Compiled(mib * 2**20, gib * 2**30, seconds, "", mib * 2**20, gib * 2**30)


def test_a_row_stands_under_its_heads():
    found = {"jax": compiled(864), "jax_auto": compiled(1728)}
    assert ratio(found) == 0.5
    heads, row = title([*found]).splitlines()[1], show(PAIR, found)
    assert row.split() == ["mlp_2d", "864", "1,728", "0.500", "1.5", "1.5", "2.00", "2.00"]
    assert len(heads) == len(row)


def test_programs_that_send_nothing_are_alike():
    assert ratio({"jax": compiled(0), "jax_auto": compiled(0)}) == 1
    assert ratio({"jax": compiled(1), "jax_auto": compiled(0)}) == float("inf")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_sends_no_more_for_ours():
    command = [sys.executable, "-m", "tests.benchmarks.gspmd_bytes", "--pair=wide_tensor"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    row = told.splitlines()[2].split()
    assert row[0] == "wide_tensor" and float(row[3]) <= 1.01
