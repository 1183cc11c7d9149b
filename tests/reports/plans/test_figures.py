"""Figures of plans."""

from types import SimpleNamespace

import pytest

from meshdsl.layouts.hardware import hardware
from meshdsl.reports.plans.figures import Figures


@pytest.mark.parametrize("name", ["v5p", "h100", "b200"])
def test_flops_are_a_share_of_the_peak_in_bfloat16(name):
    """Data sheets: 459, 989.4 and 2,250 teraflops in bfloat16, and about twice that in 8 bits."""
    peak = {"v5p": 459e12, "h100": 989.4e12, "b200": 2250e12}[name]
    plan = SimpleNamespace(program=SimpleNamespace(flops=peak))
    assert Figures(plan, hardware(name), 2.0, 1.0, {}, "").flops_share == pytest.approx(0.5)
