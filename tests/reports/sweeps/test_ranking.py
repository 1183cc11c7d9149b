"""The order of candidates and their Pareto front, against their definitions."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshdsl.reports.sweeps.ranking import front, ranked
from meshdsl.reports.sweeps.result import Result

SMALL = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(SMALL, SMALL), max_size=12))
def test_the_front_has_what_no_other_dominates(points):
    def dominates(a, b):
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    assert front(points) == [not any(dominates(a, b) for a in points) for b in points]


RESULTS = st.builds(
    Result,
    mesh=st.just("data:8"),
    layout=st.just(""),
    reason=st.sampled_from(["", "", "it is broken"]),
    seconds=st.integers(1, 3).map(float),
    wire_bytes=st.integers(0, 3).map(lambda count: {"data": float(count)}),
    peak_bytes=st.integers(1, 3),
    fits=st.booleans(),
    devices=st.sampled_from([1, 2]),
)


@given(st.lists(RESULTS, max_size=8), st.randoms())
def test_what_fits_comes_first_by_time_and_what_failed_last(results, random):
    results = [replace(one, layout=f"x:a{n}") for n, one in enumerate(results)]
    rows = ranked(results)
    assert [row.rank for row in rows] == [*range(1, len(results) + 1)]
    assert {row.result.layout for row in rows} == {one.layout for one in results}
    for above, below in itertools.pairwise(row.result for row in rows):
        assert bool(above.reason) <= bool(below.reason)
        if not below.reason:
            assert above.fits >= below.fits
            if above.fits == below.fits:
                assert above.seconds * above.devices <= below.seconds * below.devices
    assert not any(row.front for row in rows if row.result.reason or not row.result.fits)
    shuffled = list(results)
    random.shuffle(shuffled)
    assert ranked(shuffled) == rows
