"""Half precision: a program on a mesh gives the very numbers of one device.

With `reduce_dtype=float32` devices add partial sums up in float32, as one device adds its terms up,
and round them once. So they agree to the last bit, unless the order of a sum in float32 decides how
it is rounded, which is rare. Two things make a program on a mesh more accurate than on one device:
sums are reduced after operations that are linear in them, and a cast to float32 reads a sum before
it is rounded. `rounded_at_once` leaves these out.

That finds what a tolerance cannot: a sum that is rounded twice, or is added up in half precision,
is off by less than the roundings of the program around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.graphs import wide_sums
from meshdsl.lowering.options import Options
from meshdsl.lowering.placement import planning
from meshdsl.tensors.dtypes import is_float
from tests.property import minimal
from tests.property.pads import poisoned
from tests.property.programs import Case

DTYPES = ("float16", "bfloat16")
ORDER = 1e-6  # what the order of a sum in float32 may change, relative to the largest in a tensor
FEW = 0.02  # the share of numbers that may be rounded otherwise


@contextmanager
def rounded_at_once() -> Iterator[None]:
    """Makes lowering reduce and round every sum where it is made, as one device does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "place_reductions", lambda planned: {})
        patch.setattr(wide_sums, "_holds", lambda dtype: False)
        yield


def check(case: Case) -> None:
    """Raises AssertionError unless a case gives the numbers and dtypes of one device."""
    found = minimal.failure(case, "numpy")
    expected = found.run(md.Mesh(), md.Layout(), "numpy")
    for options in case.options:
        split = replace(found, options=replace(options, reduce_dtype="float32"))
        with rounded_at_once(), poisoned():
            compare(case, options, split.run(case.mesh, case.layout, "numpy"), expected)
        with poisoned():
            finite(case, options, split.run(case.mesh, case.layout, "numpy"), expected)


def compare(
    case: Case, options: Options, found: list[np.ndarray], expected: list[np.ndarray]
) -> None:
    """Raises AssertionError if more than a few numbers differ."""
    finite(case, options, found, expected)
    differ = [differences(*pair) for pair in zip(found, expected, strict=True)]
    count, total = sum(int(d.sum()) for d in differ), sum(d.size for d in differ)
    if count > FEW * total + 1:
        paths = [p for p, d in zip(case.graph.output_paths, differ, strict=True) if d.any()]
        raise AssertionError(f"{options}: {count} of {total} numbers differ, in {paths}\n{case}")


def finite(
    case: Case, options: Options, found: list[np.ndarray], expected: list[np.ndarray]
) -> None:
    """Raises AssertionError unless dtypes agree, and what is finite on one device is."""
    for have, want, path in zip(found, expected, case.graph.output_paths, strict=True):
        assert have.dtype == want.dtype, f"{options}: {path} is {have.dtype}\n{case}"
        if is_float(want.dtype):
            lost = np.isfinite(_wide(want)) & ~np.isfinite(_wide(have))
            assert not lost.any(), f"{options}: {path} is not finite\n{case}"


def differences(have: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Returns where two arrays differ by more than the order of sums in float32 explains."""
    if not is_float(want.dtype):
        return have != want
    is_finite = np.isfinite(_wide(want))
    have, want = _wide(have)[is_finite], _wide(want)[is_finite]
    tolerance = ORDER * np.abs(want).max(initial=0.0)  # of half precision: far less than a unit
    return np.abs(have - want) > tolerance


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)
