"""The table of simulated steps beside verdicts."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.benchmarks.simulated_verdicts import Simulated, table
from tests.benchmarks.test_verdicts import FIRST


def test_errors_are_those_of_the_simulation():
    verdict = replace(FIRST, step=0.1, exposed=0.02)
    slow, fast = Simulated("block", 0.12, 0.03, verdict), Simulated("vision", 0.07, 0.02, verdict)
    assert (slow.error, slow.error_of_waits) == (pytest.approx(0.2), pytest.approx(0.1))
    head, first, second, last = table([slow, fast]).splitlines()
    assert head.split() == ["step", "ms", "compiler", "error", "waits", "error"]
    assert first.split() == ["block", "120.00", "100.00", "+20.0%", "30.00", "+10.0%"]
    assert second.split() == ["vision", "70.00", "100.00", "-30.0%", "20.00", "+0.0%"]
    assert last == (
        "2 pairs: median error 25.0%, largest 30.0%; of the waits 5.0% and 10.0% of the step"
    )


@pytest.mark.long
def test_attention_without_kernels_is_simulated_as_products_over_all_scores():
    code = """
from meshdsl.layouts.costs import costs_of
from tests.benchmarks.simulated_verdicts import simulated
from tests.benchmarks.test_verdicts import FIRST
from tests.benchmarks.verdicts import without_kernels

kernels = simulated("decoder_fsdp", FIRST).step
without_kernels()
assert costs_of("v5p").attention(8, 1024, 1024, 128) is None
assert simulated("decoder_fsdp", FIRST).step > 1.01 * kernels
"""
    subprocess.run([sys.executable, "-c", code], check=True)
