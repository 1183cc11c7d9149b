"""The circular schedule: its functions of ticks, its table, its closed forms."""

import itertools

import jax
import numpy as np
import pytest

from meshdsl.lowering.pipelines.actions import Kind
from meshdsl.lowering.pipelines.buffers import live, peaks
from meshdsl.lowering.pipelines.checks.checking import check
from meshdsl.lowering.pipelines.circular import Circular
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.groups import fewest_live, fewest_ticks
from meshdsl.lowering.pipelines.interleaved import interleaved
from meshdsl.lowering.pipelines.planning import plan

SIZES = [(p, v) for p in (1, 2, 3, 4) for v in (1, 2, 3)]
MICROBATCHES = (1, 2, 3, 4, 5, 8, 11)


def both(p, v, m):
    return [Circular(p, v, m, groups) for groups in (fewest_ticks(p, m), fewest_live(p, m))]


def ticks_of_a_pass(circular):
    """Returns how many ticks have forward passes, and how many have backward passes."""
    return circular.delay + circular.steady_ticks


def most_live(circular, stage):
    """Returns the formula for the inputs of chunks that a stage keeps at a time.

    It is exact for the default number of groups, and else an upper bound.
    """
    p, v, m = circular.stages, circular.rounds, circular.microbatches
    ahead = (v - 1) * min(circular.stride, m) + 2 * (p - stage) - 1
    return min(v * m, ahead)


@pytest.mark.parametrize("p, v", SIZES)
def test_a_result_is_used_a_tick_later_or_kept(p, v):
    """Each chunk follows the one before it, and the backward pass of a chunk its forward pass."""
    for m in MICROBATCHES:
        for circular in both(p, v, m):
            for k, chunk in itertools.product(range(m), range(p * v)):
                forward, backward = (
                    f(chunk, k) for f in (circular.forward_tick, circular.backward_tick)
                )
                assert backward >= forward
                if chunk:
                    assert forward > circular.forward_tick(chunk - 1, k)
                    assert backward < circular.backward_tick(chunk - 1, k)
                if chunk % p:
                    assert forward == circular.forward_tick(chunk - 1, k) + 1


@pytest.mark.parametrize("p, v", SIZES)
def test_each_pass_has_one_tick_in_the_loops_that_have_it(p, v):
    for m in MICROBATCHES:
        for circular in both(p, v, m):
            every = {(c, k) for c in range(p * v) for k in range(m)}
            for pass_, tick_of, first, last in [
                (circular.forward, circular.forward_tick, 0, circular.ticks - circular.delay),
                (circular.backward, circular.backward_tick, circular.delay, circular.ticks),
            ]:
                done = set()
                for tick, stage in itertools.product(range(-2, circular.ticks + 2), range(p)):
                    slot = pass_(tick, stage)
                    assert slot.chunk in range(stage, p * v, p) and slot.microbatch in range(m)
                    assert slot.chunk == slot.round * p + stage
                    if slot.valid:
                        assert first <= tick < last
                        assert tick_of(slot.chunk, slot.microbatch) == tick
                        assert (slot.chunk, slot.microbatch) not in done
                        done.add((slot.chunk, slot.microbatch))
                assert done == every


@pytest.mark.parametrize("p, v, m", [(4, 2, 8), (3, 3, 7), (4, 2, 3), (2, 1, 5)])
def test_arrays_and_traced_values_give_what_ints_give(p, v, m):
    for circular in both(p, v, m):
        ticks, stages = np.mgrid[0 : circular.ticks, 0:p]
        for pass_ in (circular.forward, circular.backward):
            ints = [pass_(int(t), int(s)) for t, s in zip(ticks.flat, stages.flat, strict=True)]
            expected = np.array(ints).T.reshape(4, *ticks.shape)
            np.testing.assert_array_equal(np.array(pass_(ticks, stages)), expected)
            traced = jax.jit(pass_)(ticks.astype(np.int32), stages.astype(np.int32))
            assert traced.valid.dtype == bool
            for part, values in zip(traced, expected, strict=True):
                np.testing.assert_array_equal(part, values)


@pytest.mark.parametrize("p, v", SIZES)
def test_the_bubble_is_that_of_interleaved_1f1b(p, v):
    for m in MICROBATCHES:
        circular = Circular(p, v, m)
        if m >= p:
            assert ticks_of_a_pass(circular) == v * m + p - 1
            assert circular.bubble == pytest.approx((p - 1) / (v * m + p - 1))
        else:
            assert ticks_of_a_pass(circular) == v * p + m - 1
        assert circular.ticks == 2 * circular.delay + circular.steady_ticks


@pytest.mark.parametrize("p, v", SIZES)
def test_without_the_clock_its_table_takes_no_longer(p, v):
    for m in MICROBATCHES:
        for circular in both(p, v, m):
            makespan = plan(circular.schedule(), Costs(forward=2, backward=3)).makespan
            assert makespan <= ticks_of_a_pass(circular) * (2 + 3)
        circular = Circular(p, v, m)
        makespan = plan(circular.schedule(), Costs(forward=2, backward=3)).makespan
        assert makespan == ticks_of_a_pass(circular) * (2 + 3)


@pytest.mark.parametrize("p, v", SIZES)
def test_its_order_is_that_of_interleaved_1f1b(p, v):
    for m in MICROBATCHES:
        rows = Circular(p, v, m).schedule().without_empty_cells().rows
        assert v == 1 or rows == interleaved(p, m, v).rows


@pytest.mark.parametrize("p, v", SIZES)
def test_live_chunk_inputs_do_not_grow_with_the_microbatches(p, v):
    for m in MICROBATCHES:
        circular = Circular(p, v, m)
        assert peaks(circular.schedule()) == tuple(most_live(circular, s) for s in range(p))
        few = Circular(p, v, m, fewest_live(p, m))
        bounds = [min(v * m, (v + 1) * p - 1 - 2 * stage) for stage in range(p)]
        for stage, (peak, bound) in enumerate(zip(peaks(few.schedule()), bounds, strict=True)):
            assert peak <= most_live(few, stage) and peak <= bound
        if m % p == 0 and m >= 2 * p:
            assert [most_live(circular, stage) for stage in range(p)] == bounds


def test_columns_are_aligned_on_the_clock():
    circular = Circular(4, 2, 8)
    schedule = circular.schedule()
    check(schedule)
    assert {len(row) for row in schedule.rows} == {2 * circular.delay + 2 * circular.steady_ticks}
    for _, column, action in schedule.cells():
        steady = column - circular.delay
        if steady < 0:
            assert action.kind == Kind.FORWARD
        elif steady < 2 * circular.steady_ticks:
            assert action.kind == (Kind.BACKWARD if steady % 2 else Kind.FORWARD)
        else:
            assert action.kind == Kind.BACKWARD
    assert max(live(schedule.rows[0])) == 11


def test_fewer_live_inputs_cost_ticks_where_p_does_not_divide_m():
    fast, small = Circular(8, 4, 12), Circular(8, 4, 12, fewest_live(8, 12))
    assert (fast.items, small.items) == (48, 48 + 3 * 4)
    assert (most_live(fast, 0), most_live(small, 0)) == (48, 39)


def test_more_groups_than_microbatches_are_refused():
    with pytest.raises(ValueError, match="cannot divide 3 microbatches into 4 groups: give 1 to 3"):
        Circular(2, 2, 3, groups=4)
    with pytest.raises(ValueError, match="cannot divide 3 microbatches into -1 groups"):
        Circular(2, 2, 3, groups=-1)
