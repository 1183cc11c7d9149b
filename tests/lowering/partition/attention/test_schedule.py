"""Which blocks are attended to at which step, against every pair of positions one by one."""

import numpy as np
import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.communication.exchange import Interval, bounds
from meshdsl.lowering.partition.attention.schedule import Sight, Step, schedule


def cases(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        mesh = Mesh.parse(
            str(rng.choice(["x:1", "x:2", "x:3", "x:5", "x:8", "x:2,y:2", "x:2,y:3"]))
        )
        rows, columns = (int(size) for size in rng.integers(1, 30, 2))
        window = int(rng.integers(1, 12)) if rng.random() < 0.5 else None
        offset = int(rng.integers(0, 8)) if rng.random() < 0.3 else 0
        held = bounds(rows, mesh.names, mesh)
        yield (
            Sight(
                causal=bool(rng.random() < 0.6),
                window=window,
                columns=tuple(bounds(columns, mesh.names, mesh)),
                block=-(-columns // mesh.size),
                rows=tuple(Interval(a + offset, b + offset) for a, b in held),
            ),
            columns,
        )


def seen(sight, row, column):
    near = sight.window is None or abs(row - column) < sight.window
    return near and (row >= column or not sight.causal)


def let_through(sight, step, device, row, place, column, hides):
    """Whether a step computes the score of a query with an element of a block.

    Args:
        place: of the element in its block.
        column: its position, that of a pad being past the end.
        hides: whether it is a pad and pads are masked.
    """
    if hides or step.way == "none" or (step.active and not step.active[device]):
        return False
    if step.way == "all":
        return True
    if step.way == "positions":
        return seen(sight, row, column)
    first = sight.rows[device].start
    return seen(sight, row - first + step.offset, place)


@pytest.mark.parametrize("number", range(4))
def test_exactly_what_is_visible_is_let_through(number):
    for sight, size in list(cases(60))[number::4]:
        steps, devices = schedule(sight), len(sight.columns)
        met = np.zeros((devices, devices), int)
        for step in steps.steps:
            for device, rows in enumerate(sight.rows):
                source = (device - step.shift) % devices
                block = sight.columns[source]
                met[device, source] += 1
                for row in range(rows.start, rows.stop):
                    for place in range(sight.block):
                        column = block.start + place if place < block.size else size
                        pad = place >= block.size
                        found = let_through(
                            sight, step, device, row, place, column, pad and steps.pads
                        )
                        assert found == (not pad and seen(sight, row, column)), (sight, step)
        for device, rows in enumerate(sight.rows):
            for source, block in enumerate(sight.columns):
                visible = any(
                    seen(sight, row, column)
                    for row in range(rows.start, rows.stop)
                    for column in range(block.start, block.stop)
                )
                assert met[device, source] <= 1
                assert met[device, source] or not visible


def whole(devices, block, causal=True, window=None):
    shards = tuple(Interval(i * block, (i + 1) * block) for i in range(devices))
    return schedule(Sight(causal, window, shards, block, shards))


def test_a_causal_ring_masks_its_own_block_only_and_skips_what_is_later():
    found = whole(3, 4)
    later = Step(1, "all", active=(False, True, True)), Step(2, "all", active=(False, False, True))
    assert found.steps == (Step(0, "shifted"), *later)
    assert not found.wraps(found.ahead)
    assert not found.by_positions


@pytest.mark.parametrize(
    ("window", "hops"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (999, 7)]
)
def test_a_window_ends_the_ring_where_nobody_sees_further(window, hops):
    """The first query of a block of 4 sees window - 1 positions of the blocks before."""
    assert whole(8, 4, True, window).hops == hops
    both = whole(8, 4, False, window)
    assert (len(both.ahead), len(both.behind)) == ((hops, hops) if hops < 4 else (7, 0))


def test_without_masks_everybody_sees_everything():
    found = whole(4, 2, causal=False)
    assert found.steps == tuple(Step(shift, "all") for shift in range(4))
    assert found.wraps(found.ahead)


def test_positions_that_are_known_later_are_asked_for_at_every_step():
    found = schedule(Sight(True, None, whole_columns := (Interval(0, 2), Interval(2, 3)), 2))
    assert [step.way for step in found.steps] == ["positions"] * len(whole_columns)
    assert found.pads
    assert found.by_positions
