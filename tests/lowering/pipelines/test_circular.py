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
            assert circular.seconds(2, 3) == (v * m + p - 1) * (2 + 3)
            assert circular.bubble == pytest.approx((p - 1) / (v * m + p - 1))
        else:
            assert circular.seconds(2, 3) == (v * p + m - 1) * (2 + 3)
        assert circular.ticks == 2 * circular.delay + circular.steady_ticks


@pytest.mark.parametrize("p, v", SIZES)
def test_without_the_clock_its_table_takes_no_longer(p, v):
    for m in MICROBATCHES:
        for circular in both(p, v, m):
            makespan = plan(circular.schedule(), Costs(forward=2, backward=3)).makespan
            assert makespan <= circular.seconds(2, 3)
        assert plan(Circular(p, v, m).schedule(), Costs(forward=2, backward=3)).makespan == (
            Circular(p, v, m).seconds(2, 3)
        )


@pytest.mark.parametrize("p, v", SIZES)
def test_its_order_is_that_of_interleaved_1f1b(p, v):
    for m in MICROBATCHES:
        rows = Circular(p, v, m).schedule().without_empty_cells().rows
        assert v == 1 or rows == interleaved(p, m, v).rows


@pytest.mark.parametrize("p, v", SIZES)
def test_live_chunk_inputs_do_not_grow_with_the_microbatches(p, v):
    for m in MICROBATCHES:
        circular = Circular(p, v, m)
        assert peaks(circular.schedule()) == tuple(circular.live(stage) for stage in range(p))
        few = Circular(p, v, m, fewest_live(p, m))
        bounds = [min(v * m, (v + 1) * p - 1 - 2 * stage) for stage in range(p)]
        for stage, (peak, bound) in enumerate(zip(peaks(few.schedule()), bounds, strict=True)):
            assert peak <= few.live(stage) and peak <= bound
        if m % p == 0 and m >= 2 * p:
            assert [circular.live(stage) for stage in range(p)] == bounds


@pytest.mark.parametrize("p, v", SIZES)
def test_a_ring_and_buffers_run_it_as_a_lowering_does(p, v):
    for m in MICROBATCHES:
        for circular in both(p, v, m):
            run_on_a_ring(circular)


def run_on_a_ring(circular):
    """Runs all ticks with values that say what they are; each stage sees its own values only."""
    stages, last = range(circular.stages), circular.stages * circular.rounds - 1
    input_buffers = [circular.input_buffers(stage) for stage in stages]
    gradient_buffers = [circular.gradient_buffers(stage) for stage in stages]
    kept, gradients = [{} for _ in stages], [{} for _ in stages]
    outputs, returned = [None for _ in stages], [None for _ in stages]
    count = 0
    for tick in range(circular.ticks):
        for stage in stages:
            before, after = (stage - 1) % circular.stages, (stage + 1) % circular.stages
            slot = circular.forward(tick - 1, before)
            if slot.valid and slot.chunk < last:
                buffer = input_buffers[stage][slot.chunk + 1, slot.microbatch]
                kept[stage][buffer] = outputs[before]
            slot = circular.backward(tick - 1, after)
            if slot.valid and slot.chunk > 0:
                buffer = gradient_buffers[stage][slot.chunk - 1, slot.microbatch]
                gradients[stage][buffer] = returned[after]
        for stage in stages:
            slot = circular.forward(tick, stage)
            if slot.valid:
                key = (slot.chunk, slot.microbatch)
                buffer = input_buffers[stage][key]
                if slot.chunk == 0:
                    kept[stage][buffer] = ("output", -1, slot.microbatch)
                assert kept[stage][buffer] == ("output", slot.chunk - 1, slot.microbatch)
                outputs[stage] = ("output", *key)
            slot = circular.backward(tick, stage)
            if slot.valid:
                key = (slot.chunk, slot.microbatch)
                stored = kept[stage][input_buffers[stage][key]]
                assert stored == ("output", slot.chunk - 1, slot.microbatch)
                if slot.chunk < last:
                    gradient = gradients[stage][gradient_buffers[stage][key]]
                    assert gradient == ("gradient", slot.chunk + 1, slot.microbatch)
                returned[stage] = ("gradient", *key)
                count += 1
    assert count == (last + 1) * circular.microbatches


@pytest.mark.parametrize("p, v", SIZES)
def test_groups_of_p_need_no_buffer_beyond_the_live_inputs(p, v):
    for groups in (1, 2, 5):
        circular = Circular(p, v, groups * p)
        for stage in range(p):
            buffers = circular.input_buffers(stage).values()
            assert set(buffers) == set(range(circular.live(stage)))


@pytest.mark.parametrize("p, v", SIZES)
def test_gradients_are_used_at_once_unless_a_larger_group_comes_around(p, v):
    for m in MICROBATCHES:
        for circular in both(p, v, m):
            for stage in range(p):
                buffers = circular.gradient_buffers(stage)
                assert len(buffers) == m * (v - (stage == p - 1))
                if circular.stride == p:
                    assert set(buffers.values()) <= {0}
        late = Circular(2, 2, 3).gradient_buffers(1)
        assert max(late.values()) == 1


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
    assert (fast.live(0), small.live(0)) == (48, 39)


def test_more_groups_than_microbatches_are_refused():
    with pytest.raises(ValueError, match="cannot divide 3 microbatches into 4 groups: give 1 to 3"):
        Circular(2, 2, 3, groups=4)
    with pytest.raises(ValueError, match="cannot divide 3 microbatches into -1 groups"):
        Circular(2, 2, 3, groups=-1)
