"""On random programs, machines and layouts, no program that lowering makes is below its bounds.

The independent reference is the simulator: each point is lowered, and the time and the memory of
its program are held against what arithmetic on one device's program says. `lower` may write a
point in many ways; the bounds hold for all of them, so one that nobody chose is tried as well.
"""

import numpy as np
import pytest

from meshdsl.layouts.layout import Layout
from meshdsl.lowering.choices import Choice
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.passes.halves import candidates
from meshdsl.search.searching import Search
from tests.search.programs import make_case

_QUICK, _ALL = 8, 60
_SHARE = 0.999  # sums of many figures round


def check(number, most, pinned=""):
    """Raises AssertionError if a point of a case is faster or smaller than its bounds.

    Returns the number of programs that were checked.
    """
    case = make_case(number)
    devices, slices = (8, 1) if pinned else (case.devices, case.slices)
    rules = Layout.parse(pinned)
    search = Search(case.step, case.hardware, devices, rules, slices=slices)
    rows, points, _ = search.candidates()
    assert len(rows) == points  # all fit
    rng = np.random.default_rng([number, 5])
    checked = 0
    for at in rng.permutation(points)[:most]:
        row = search.estimated(rows[at])
        point = row.point
        place = point.mesh, point.layout, point.variant
        try:
            decided = search.program(*place)
        except ValueError:  # such as stages that do not divide what a pipeline has
            continue
        dims = ["", *candidates(decided)]
        switches = ("keep", "share", "reduce_each", "apart", "joint")
        on = {name: bool(rng.random() < 0.5) for name in switches}
        choice = Choice(**on, halves=str(rng.choice(dims)))
        for program in (decided, search.program(*place, search.quick, choice)):
            what = f"case {number}, {case.hardware}: {place}\n{choice}"
            assert step_seconds(program, search.hardware) >= _SHARE * row.bound, what
            assert program.peak_bytes >= _SHARE * row.peak, what
            checked += 1
    return checked


@pytest.mark.long
@pytest.mark.parametrize("number", range(_QUICK))
def test_no_random_program_is_below_its_bounds(number):
    check(number, most=3)


@pytest.mark.long
@pytest.mark.parametrize("pinned", ["rows:x+y", "embed:x+y"])
@pytest.mark.parametrize("number", [0, 4])
def test_no_program_of_rules_with_several_axes_is_below_its_bounds(number, pinned):
    assert check(number, 3, pinned) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "pinned", ["rows:x+y", "embed:x+y", "rows:x+y; embed:z", "embed:y+x; rows:z"]
)
@pytest.mark.parametrize("number", range(5, 12))
def test_no_other_program_of_such_rules_is_below_its_bounds(number, pinned):
    check(number, 6, pinned)


def test_random_cases_differ_and_most_can_be_split():
    cases = [make_case(number) for number in range(_QUICK)]
    assert len({case.hardware for case in cases}) > 2
    found = [Search(c.step, c.hardware, c.devices, slices=c.slices).candidates() for c in cases]
    assert sum(points > 5 for _, points, _ in found) > _QUICK / 2
    kinds = {role.kind for rows, _, _ in found for r in rows for role in r.point.structure.roles}
    assert {"data", "context", "weights"} <= kinds


@pytest.mark.slow
@pytest.mark.parametrize("number", range(_QUICK, _ALL))
def test_no_other_random_program_is_below_its_bounds(number):
    check(number, most=8)
