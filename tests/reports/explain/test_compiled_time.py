"""The time of a compiled step as text, where it is not known."""

from types import MappingProxyType

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.hlo.schedule import schedule
from meshdsl.lowering.backends.jax import ahead
from meshdsl.lowering.compiled import Compiled
from meshdsl.lowering.costs.schedule import Event, Schedule
from meshdsl.reports.explain.compile_report import report
from meshdsl.reports.explain.compiled_time import time_of_step
from meshdsl.reports.explain.explanation import explain

EIGHT = Topology.parse("v5e:2x4")


def lowered():
    a, b = md.dims(a=64, b=64)
    f = md.jit(lambda x: md.sum(md.exp(x)), "data:2,model:4", "a:data; b:model")
    return f.lower(md.spec([a, b]))


def explained():
    return explain(lowered(), "v5e")


def reported(compiled, others=MappingProxyType({})):
    return report(lowered(), explained(), EIGHT, compiled, [], others)


def test_the_bytes_and_the_time_each_have_their_reason():
    text = reported(Compiled(9, None, True, None, 1, 1, "no groups", None, "no trips"))
    wire, time = (part for part in text.split("\n\n") if "not known" in part)
    assert wire.startswith("on the wire") and wire.endswith("compiler: not known; no groups")
    assert time.startswith("time of a step") and time.endswith("  not known; no trips")
    known = reported(Compiled(9, None, True, {"all_reduce": 5.0}, 1, 1, "", None, "no trips"))
    assert known.count("not known") == 1 and "5 B" in known


def test_the_time_of_another_program_has_its_own_reason():
    work = Event("work", "a", "a", "", 0.0, 1e-3)
    ours = Compiled(9, None, True, {}, 1, 1, schedule=Schedule(1e-3, (work,), {}, True))
    other = Compiled(9, None, True, {"all_reduce": 5.0}, 1, 1, untimed="no trips")
    assert "  jax_auto: not known; no trips" in reported(ours, {"jax_auto": other})


def test_sends_of_stages_say_how_many_span_products():
    def send(start, spans):
        return Event(
            "permute",
            "p",
            "p",
            "",
            start,
            1e-3,
            2e-6,
            ("pipe",),
            asynchronous=True,
            spans_product=spans,
        )

    work = Event("work", "a", "a", "", 0.0, 1e-3, product=True)
    warm = Event("while", "w", "w", "", 0.0, 3e-3, count=3, inside=(work, send(1e-3, False)))
    both = (send(0.0, True), work, send(1e-3, True))
    steady = Event("while", "s", "s", "", 3e-3, 8e-3, count=8, inside=both)
    outside = send(2e-2, False)
    schedule = Schedule(2e-2, (warm, steady, outside), {}, True)
    compiled = Compiled(9, None, True, {}, 1, 1, schedule=schedule)
    plan = explained().timeline
    lines = "\n".join(time_of_step(plan, schedule, compiled, {}, ["pipe"]))
    assert "of 19 sends between stages, 16 have products" in lines
    assert "waits 38.0 µs for them all" in " ".join(lines.split())
    assert "sends between stages" not in "\n".join(time_of_step(plan, schedule, compiled, {}))


def test_work_without_cycles_is_named():
    known = Schedule(1e-3, (), {"attend": 6, "copy.3": 1}, True)
    text = reported(Compiled(9, None, True, {}, 1, 1, schedule=known))
    assert "  work without cycles, not in it: attend × 6, copy.3 × 1\n" in text


def test_a_loop_that_depends_on_data_loses_the_time_alone():
    text = """HloModule m

%condition (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  ROOT %p = pred[] get-tuple-element(%c), index=0
}

%body (b: (s32[])) -> (s32[]) {
  %a = f32[8] convolution(%x), backend_config={"estimated_cycles":"9"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[]) while(%x), condition=%condition, body=%body
}
"""
    found, unread = ahead._known(lambda: ahead._sent(text, 8))
    assert (found, unread) == ({}, "")
    times, untimed = ahead._known(lambda: schedule(text, Mesh.parse("data:8"), EIGHT.hardware))
    assert times is None and untimed.startswith("how often w runs is not known")
