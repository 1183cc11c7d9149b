"""Calibrating: what is measured, on the virtual devices of the tests."""

import itertools
import math

import jax
import numpy as np
import pytest

from meshdsl.layouts.fits import SIZES, arrays_of, kind_of, runs_of
from meshdsl.layouts.hardware import COLLECTIVES
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.jax.calibrating import measuring, timing
from meshdsl.lowering.backends.jax.calibrating.measuring import begun, measured, missing
from meshdsl.lowering.backends.jax.calibrating.ranges import OF_ACCELERATORS, OF_CPUS, Ranges
from meshdsl.lowering.backends.jax.calibrating.samples import (
    ATTENTION,
    FUNCTIONS,
    GROUP,
    SENDING,
    Sample,
    beside,
    collective,
    divisors,
    families,
    product,
    samples,
)
from meshdsl.lowering.backends.jax.calibrating.timing import Clock, Loop, dispatch_seconds
from meshdsl.lowering.costs.products import product_sizes
from meshdsl.lowering.program import Block, payload_bytes

EIGHT = jax.devices()[:8]
WALL = Clock(False, 2)


def block_of(instruction):
    return Block(instruction.inputs, (instruction,), instruction.outputs)


@pytest.mark.parametrize("family", families(8))
def test_every_sample_has_the_sizes_that_its_family_names_and_runs_once(family):
    made = list(samples(family, 8))
    assert len({sample.sizes for sample in made}) == len(made) >= 1
    assert all(len(sample.sizes) == len(SIZES[kind_of(family)]) for sample in made)
    smallest = min(made, key=lambda sample: sum(v.bytes for v in sample.block.inputs))
    loop = Loop.of(smallest.block, smallest.mesh, EIGHT)
    operands, some = loop.run(np.int32(2), *loop.operands)
    assert len(some) == len(smallest.block.outputs) and len(operands) == len(smallest.block.inputs)


def test_a_loop_computes_what_its_block_says():
    rows, inner, columns = 16, 64, 16
    one = product("float32", "rows", 1, rows, inner, columns)
    loop = Loop.of(block_of(one), Mesh.parse("all:8"), EIGHT)
    x, y = (np.array(array) for array in loop.operands)
    _, (some,) = loop.run(np.int32(1), *loop.operands)
    x[:, 0, 0, 0] = 0  # the element that the results, zeros at first, are written to
    expected = np.einsum("dork,dkc->dorc", x.astype(float), y.astype(float))[:, 0, 0, 0]
    np.testing.assert_allclose(np.asarray(some).reshape(8), expected, rtol=1e-5)


def test_products_are_those_of_their_sizes():
    for form, batch in itertools.product(("rows", "leading"), (1, 8)):
        one = product("float32", form, batch, 16, 256, 64)
        assert product_sizes(one) == (batch, 16, 256, 64)


@pytest.mark.parametrize("family", SENDING)
def test_collectives_have_their_payload(family):
    for sample in samples(family, 8):
        (one,) = sample.block.instructions
        assert sample.sizes == (sample.mesh.sizes[GROUP], payload_bytes(one, sample.mesh))


@pytest.mark.parametrize("function", [*FUNCTIONS, "step"])
def test_a_sample_of_a_function_has_the_arrays_and_the_runs_that_are_reckoned_with(function):
    (sample,) = samples(f"functions/{function}", 8)
    block = sample.block
    assert len(block.inputs) + len(block.outputs) == arrays_of(function)
    assert len(block.instructions) == runs_of(function)
    assert {value.bytes for value in (*block.inputs, *block.outputs)} == {4 * sample.sizes[0]}


def test_gathers_and_scatters_are_along_the_first_dim_or_along_a_later_one():
    mesh = Mesh.parse(f"others:2,{GROUP}:4")
    dims = {family: collective(family, mesh, 2**15).params.get("dim") for family in SENDING}
    assert dims["all_gather/first"] == dims["reduce_scatter/first"] == "row"
    assert dims["all_gather/later"] == dims["reduce_scatter/later"] == "column"
    assert {kind_of(family) for family in SENDING} == set(COLLECTIVES)


@pytest.mark.parametrize("kind", ["gathers", "scatters"])
def test_look_ups_and_scatters_along_a_later_dim_move_the_same_rows(kind):
    by_sizes = {
        family: {sample.sizes: sample.block.instructions[0] for sample in samples(family, 8)}
        for family in (kind, f"{kind}/later")
    }
    first, later = by_sizes.values()
    assert first.keys() == later.keys()
    for sizes, one in first.items():
        tables = [x.inputs[0] if kind == "gathers" else x.outputs[0] for x in (one, later[sizes])]
        assert [table.local.position("entry") for table in tables] == [0, 1]
        assert tables[0].bytes == tables[1].bytes


class Counting:
    """A clock for which every call takes 1 ms, and every iteration of a loop 10 µs more."""

    def __init__(self, loop):
        self.counts = []
        run = loop.run
        loop.run = lambda count, *operands: self.counts.append(int(count)) or run(count, *operands)

    def time(self, call):
        call()
        return 1e-3 + 1e-5 * self.counts[-1]


def test_the_time_of_an_iteration_is_without_that_of_the_call():
    (sample, *_) = samples("reductions/minor", 8)
    loop = Loop.of(sample.block, sample.mesh, EIGHT)
    clock = Counting(loop)
    assert loop.seconds(clock, 5e-3) == pytest.approx(1e-5)
    assert max(clock.counts) == 500


def test_a_disturbed_call_does_not_make_an_operation_free(monkeypatch):
    (sample, *_) = samples("reductions/minor", 8)
    loop = Loop.of(sample.block, sample.mesh, EIGHT)
    clock = Counting(loop)
    usual = clock.time

    def disturbed(call):
        seconds, number = usual(call), len(clock.counts)
        # Calls without iterations are the second to the sixth. In the next one, a single iteration
        # seems to take a second, and so to be enough.
        return seconds + (1e-4 if 2 <= number <= 6 else 1.0 if number == 7 else 0.0)

    monkeypatch.setattr(clock, "time", disturbed)
    assert loop.seconds(clock, 5e-3) == pytest.approx(1e-5)


def test_an_empty_call_takes_some_time():
    assert dispatch_seconds(2, EIGHT, WALL) > 0


def test_virtual_devices_count_processor_time_and_fewer_than_the_cores_do_not():
    assert Clock.of(EIGHT, 2) == Clock(True, 2) and Clock.of(EIGHT, 2).name == "processor"
    assert Clock.of(EIGHT[:1], 2) == Clock(False, 2) and Clock.of(EIGHT[:1], 2).name == "wall"

    def spin():
        return sum(range(10**6))

    assert 0 < Clock(True, 4).time(spin) < 4 * Clock(True, 1).time(spin)


def few(monkeypatch):
    """Lets a calibration have two families of one sample each, and measures without a clock."""
    monkeypatch.setattr(measuring, "families", lambda *arguments: ["elementwise", "all_reduce"])
    monkeypatch.setattr(measuring, "_seconds", lambda *arguments: 1e-3)
    monkeypatch.setattr(measuring, "dispatch_seconds", lambda count, *rest: count * 1e-5)


def test_families_are_measured_one_after_another_and_none_twice(monkeypatch):
    few(monkeypatch)
    empty = begun(EIGHT)
    assert empty.machine.devices == 8 and empty.memory_bytes > 2**20
    overlaps = [f"overlap/{kind}" for kind in COLLECTIVES]
    assert missing(empty) == ["elementwise", "all_reduce", "dispatch", *overlaps]
    steps = list(measured(empty, EIGHT))
    assert [step.left for step in steps] == list(reversed(range(8)))
    last = steps[-1].calibration
    assert missing(last) == [] and list(measured(last, EIGHT)) == []
    assert last.seconds["dispatch"][(32,)] == pytest.approx(32e-5)
    assert last.seconds["all_reduce"][(4, 2**16)] == 1e-3
    assert set(last.overlap) == set(COLLECTIVES)
    assert missing(steps[0].calibration) == ["all_reduce", "dispatch", *overlaps]


def test_a_measurement_whose_time_is_over_stops_between_families(monkeypatch):
    few(monkeypatch)
    asked = iter([False, True])
    (only,) = measured(begun(EIGHT), EIGHT, lambda: next(asked))
    assert only.family == "elementwise" and only.left == 7


def test_a_collective_beside_a_product_depends_on_the_iteration_as_the_product_does():
    mesh = Mesh.parse(f"others:1,{GROUP}:8")
    block = beside("all_gather", mesh, 2**10, product("float32", "rows", 1, 16, 16, 16))
    loop = Loop.of(block, mesh, EIGHT)
    before = [np.array(array) for array in loop.operands]
    after, _ = loop.run(np.int32(1), *loop.operands)
    changed = [not np.array_equal(a, np.asarray(b)) for a, b in zip(before, after, strict=True)]
    assert changed == [True, False, True]  # the product's first operand, and the collective's


@pytest.mark.parametrize("family", families(8, OF_ACCELERATORS))
def test_accelerators_are_measured_at_larger_sizes(family):
    made = [sample.sizes for sample in samples(family, 8, OF_ACCELERATORS)]
    assert len(set(made)) == len(made) >= 1
    assert all(len(sizes) == len(SIZES[kind_of(family)]) for sizes in made)
    if family in families(8) and kind_of(family) != "sharing":
        most = max(math.prod(sample.sizes) for sample in samples(family, 8))
        assert max(map(math.prod, made)) > most


def test_accelerators_have_attention_in_half_precision():
    assert {f"{op}/bfloat16" for op in ATTENTION} < set(families(1, OF_ACCELERATORS))
    assert Ranges.of("gpu") is Ranges.of("tpu") is OF_ACCELERATORS
    assert Ranges.of("cpu") is OF_CPUS


def test_a_block_can_run_several_times_in_an_iteration():
    """Each run depends on the one before."""
    (sample, *_) = samples("functions/exp", 8)
    once, thrice = (Loop.of(sample.block, sample.mesh, EIGHT, count) for count in (1, 3))
    expected, found = (
        np.asarray(loop.run(np.int32(count), *loop.operands)[1][0])
        for loop, count in ((once, 3), (thrice, 1))
    )
    np.testing.assert_array_equal(found, expected)
    thrice = Loop.of(sample.block, sample.mesh, EIGHT, 3)
    clock = Counting(thrice)
    assert thrice.seconds(clock, 5e-3) == pytest.approx(1e-5 / 3)


def test_the_time_of_an_iteration_without_work_is_taken_off(monkeypatch):
    (sample, *_) = samples("elementwise", 8)
    monkeypatch.setattr(measuring.Loop, "seconds", lambda *arguments: 5e-6)
    assert measuring._seconds(sample.block, sample.mesh, EIGHT, WALL, 2e-6) == pytest.approx(3e-6)
    assert 0 < measuring._seconds(sample.block, sample.mesh, EIGHT, WALL, 6e-6) < 1e-6


@pytest.mark.long
def test_one_device_has_no_collectives():
    assert not set(families(1)) & {*COLLECTIVES, "sharing"}
    assert divisors(8) == [1, 2, 4, 8] and divisors(1) == [1]
    groups = {sample.sizes[0] for sample in samples("all_gather", 8)}
    assert groups == {2, 4, 8}
    assert all(isinstance(sample, Sample) for sample in samples("sharing", 4))
    assert timing.Clock.of(EIGHT, 8).processor
