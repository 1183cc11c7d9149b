"""The step as intervals: what they add up to, loops told once, and what is used meanwhile."""

import itertools

import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.flops import flops, instruction_flops
from meshdsl.lowering.costs.timeline import over
from meshdsl.reports.explain.explanation import explain
from tests.reports.explain.steps import LARGE, MEGATRON, SMALL, explained


def totals(intervals, figure):
    """Returns a figure of all intervals together, those of loops as often as they run."""
    return sum(
        i.count * totals(i.inside, figure) if i.inside else getattr(i, figure) for i in intervals
    )


def test_collectives_send_what_the_program_sends():
    program, found = explained()
    line = found.timeline
    assert totals(line.intervals, "wire_bytes") == pytest.approx(program.wire_bytes)
    sent = [i for i in line.walk() if i.axes]
    assert {i.kind for i in sent} == {c.kind for c in program.collectives}
    assert {i.source for i in sent} <= {c.source for c in program.collectives}


def test_products_are_those_of_the_program():
    program, found = explained()
    counted = program.block.counted(instruction_flops)
    products = sum(instruction_flops(i) * n for i, n in counted if i.op == "einsum")
    assert 0 < products < flops(program)
    assert totals(found.timeline.intervals, "flops") == products


def test_the_times_add_up_to_the_step():
    _, found = explained()
    line = found.timeline
    assert line.seconds == pytest.approx(sum(i.seconds for i in line.intervals))
    assert line.seconds == pytest.approx(totals(line.intervals, "seconds"))
    assert list(line.times.values()) == sorted(line.times.values(), reverse=True)
    local = line.times["memory"] + line.times.get("compute", 0)
    assert local <= line.overlapped_seconds <= line.seconds
    assert line.overlapped_seconds >= line.times["over model"]


def test_a_loop_is_one_interval_with_its_body_inside_reported_once():
    _, found = explained()
    loops = [i for i in found.timeline.intervals if i.kind == "scan"]
    assert [i.phase for i in loops] == ["forward", "backward"]
    for loop in loops:
        assert (loop.name, loop.count) == ("layers", 4)
        assert loop.seconds == pytest.approx(4 * sum(i.seconds for i in loop.inside))
        assert all(i.phase == loop.phase for i in loop.inside)
        assert not any(i.inside for i in loop.inside)


def test_the_timeline_does_not_grow_with_depth_and_its_time_does():
    small, deep = (explained(**{**SMALL, "layers": n})[1].timeline for n in (4, 40))
    assert len(list(small.walk())) == len(list(deep.walk()))
    first = [i for i in small.intervals if i.kind == "scan"]
    second = [i for i in deep.intervals if i.kind == "scan"]
    for a, b in zip(first, second, strict=True):
        assert b.seconds == pytest.approx(10 * a.seconds)


def test_instructions_of_one_line_are_one_interval():
    _, found = explained()
    intervals = found.timeline.intervals
    for one, other in itertools.pairwise(intervals):
        if one.kind == other.kind == "local" and one.phase == other.phase:
            assert one.source != other.source


def test_the_most_live_bytes_are_the_peak():
    program, found = explained()
    curve = program.memory.curve
    assert max(curve.values()) == program.peak_bytes
    used = [i.memory_bytes for i in found.timeline.walk() if i.memory_bytes is not None]
    assert max(used) == program.peak_bytes
    at_peak = [i for i in found.timeline.walk() if i.memory_bytes == program.peak_bytes]
    assert program.memory.source in {i.source for i in at_peak}


def test_live_bytes_fall_when_activations_are_freed():
    _, found = explained(batch=512)
    loops = [i for i in found.timeline.intervals if i.kind == "scan"]
    last = [i.memory_bytes for i in found.timeline.intervals if i.memory_bytes][-1]
    assert loops[0].memory_bytes > 10 * last and loops[1].memory_bytes > 10 * last


def test_live_bytes_are_known_inside_of_loops():
    _, found = explained()
    for loop in (i for i in found.timeline.intervals if i.inside):
        assert max(i.memory_bytes or 0 for i in loop.inside) == loop.memory_bytes


def test_of_a_cond_the_branch_that_takes_longer_counts():
    n, m = md.dims(n=512, m=512)

    program = md.jit(lambda x: md.cond(md.sum(x) > 0, lambda: md.sin(x), lambda: x)).lower(
        md.spec([n, m])
    )
    (cond,) = [i for i in explain(program).timeline.intervals if i.kind == "cond"]
    assert cond.seconds >= 2 * 4 * 512 * 512 / hardware("v5p").memory_bandwidth
    assert cond.inside


def test_of_a_while_loop_one_iteration_counts():
    n = md.dims(n=1024)[0]
    program = md.jit(
        lambda x: md.while_loop(lambda y: md.sum(y) < 100, lambda y: md.sin(y) + 1, x)
    ).lower(md.spec([n]))
    (loop,) = [i for i in explain(program).timeline.intervals if i.kind == "while"]
    assert loop.count == 1
    assert loop.seconds == pytest.approx(sum(i.seconds for i in loop.inside)) and loop.inside


def test_slower_hardware_takes_longer_and_its_slow_axes_are_reported():
    program, _ = explained(mesh="data:4 model:8", layout=MEGATRON, heads=8)
    v5p, h100 = (explain(program, name).timeline for name in ("v5p", "h100"))
    assert v5p.slow == frozenset() and h100.slow == {"data"}
    assert h100.hardware.title == "NVIDIA H100 SXM"
    assert explain(program, "cpu").timeline.seconds > v5p.seconds
    with pytest.raises(ValueError, match="unknown hardware 'gpu'"):
        explain(program, "gpu")


def test_a_large_model_multiplies_at_a_part_of_the_peak():
    program, found = explained(mesh="data:64 model:8", **LARGE)
    assert found.timeline.limit == "compute"
    assert 0.3 < found.timeline.used(program.flops) < 1


def test_a_program_that_does_nothing_takes_no_time():
    n = md.dims(n=4)[0]
    line = explain(md.jit(lambda x: x.rename(n="m")).lower(md.spec([n]))).timeline
    assert (line.intervals, line.seconds, line.overlapped_seconds, line.limit) == ((), 0, 0, "")
    assert line.used(0) == 0


def test_the_same_axes_in_another_order_are_one_limit():
    mesh = Mesh.parse("slice:2,data:4")
    assert over(["slice", "data"], mesh) == over(["data", "slice"], mesh) == "over slice+data"
