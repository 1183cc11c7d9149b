"""Every part of a calibration's file is checked, and a bad one is named."""

from dataclasses import asdict

import pytest

from meshdsl.layouts.calibration_checks import (
    checked_clock,
    checked_count,
    checked_machine,
    checked_overlap,
    checked_seconds,
)
from tests.layouts.calibrations import MACHINE

NAN, INFINITE = float("nan"), float("inf")


def test_good_parts_are_what_they_say():
    assert checked_machine(asdict(MACHINE)) == MACHINE
    assert checked_count("cores", 2.0) == 2
    assert checked_clock("wall") == "wall"
    assert checked_overlap({"permute": 1}) == {"permute": 1.0}
    rows = {"products/bfloat16/leading": [[1, 2, 3, 4.0, 1]], "sharing": [[1, 5e-1], [2, 1]]}
    assert checked_seconds(rows) == {
        "products/bfloat16/leading": {(1, 2, 3, 4): 1.0},
        "sharing": {(1,): 0.5, (2,): 1.0},
    }


def test_a_machine_needs_all_its_fields_and_their_types():
    fields = asdict(MACHINE)
    needs = "`machine` needs cores, device_kind, devices, host, jaxlib, platform, processor"
    for bad in ({}, {**fields, "color": "red"}, [1], None):
        with pytest.raises(ValueError, match=needs):
            checked_machine(bad)
    with pytest.raises(ValueError, match="`devices` of `machine` is '8', but needs a positive int"):
        checked_machine({**fields, "devices": "8"})
    with pytest.raises(ValueError, match=r"`jaxlib` of `machine` is 0.1, but needs a text"):
        checked_machine({**fields, "jaxlib": 0.1})


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "2", True, NAN, INFINITE, 10**400])
def test_a_count_is_a_positive_integer(value):
    with pytest.raises(ValueError, match=r"`memory_bytes` is .*, but needs a positive integer"):
        checked_count("`memory_bytes`", value)


def test_there_are_two_clocks():
    for bad in ("sun", None, []):
        with pytest.raises(ValueError, match=r"`clock` is .*, but needs one of processor, wall"):
            checked_clock(bad)


def test_an_overlap_is_the_share_of_a_collective():
    with pytest.raises(ValueError, match=r"`overlap` is \[\], but needs an object"):
        checked_overlap([])
    with pytest.raises(
        ValueError, match=r"`overlap` names 'gather', which is none of all_reduce, "
    ):
        checked_overlap({"gather": 0.5})
    for bad in (-0.1, 1.1, "all", NAN, None):
        with pytest.raises(ValueError, match=r"of `permute` is .*, but needs a share from 0 to 1"):
            checked_overlap({"permute": bad})


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (3, r"`seconds` is 3, but needs an object"),
        ({"magic": [[1, 2]]}, r"`magic` is no family; the families are products, .*, dispatch"),
        ({"gather": [[1, 2]]}, r"`gather` is no family; .*Did you mean `gathers`"),
        ({"products": [[1] * 5]}, r"products are called products/float32/rows"),
        ({"products/float32/up": [[1] * 5]}, r"products are called products/float32/rows"),
        ({"products/float31/rows": [[1] * 5]}, r"unknown dtype 'float31'; choose one of bool, "),
        ({"elementwise": []}, r"`elementwise` is \[\], but needs a list of rows"),
        ({"elementwise": 7}, r"`elementwise` is 7, but needs a list of rows"),
        ({"elementwise": [[4, 1.0], [4]]}, r"row 2 of `elementwise` is \[4\], .* bytes, seconds: "),
        ({"elementwise": [4]}, r"row 1 of `elementwise` is 4, but needs bytes, seconds: positive"),
        ({"elementwise": [[4, -1.0]]}, r"row 1 of `elementwise` is \[4, -1.0\]"),
        ({"elementwise": [[4, NAN]]}, r"row 1 of `elementwise` is \[4, nan\]"),
        ({"elementwise": [[4, INFINITE]]}, r"row 1 of `elementwise` is \[4, inf\]"),
        ({"elementwise": [[4, "1"]]}, r"row 1 of `elementwise` is \[4, '1'\]"),
        ({"elementwise": [[4.5, 1]]}, r"\[4.5, 1\], .* and integers but for the seconds"),
        ({"elementwise": [[4, 1], [4, 2]]}, r"row 2 of `elementwise` has the sizes of another"),
    ],
)
def test_a_bad_measurement_is_named(seconds, message):
    with pytest.raises(ValueError, match=message):
        checked_seconds(seconds)
