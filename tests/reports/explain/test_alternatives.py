"""What other options would send and hold is told beside what a program does."""

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.reports.explain import alternatives, explain
from tests.reports.explain.steps import MEGATRON, SMALL, arguments, make_step

FSDP = f"{MEGATRON}; params/embed:data"


def step(options=None, layout=FSDP):
    jitted = md.jit(make_step(), "data:2 model:4", layout, donate="state", options=options)
    return jitted.lower(*arguments(**SMALL))


def attending(options=None, layout="length:context; memory_length:context"):
    dims = md.dims(batch=4, length=64, heads=4, kv=16)
    q = md.spec(dims)
    k = md.spec([d if d.name != "length" else md.Dimension("memory_length", 64) for d in dims])
    f = md.jit(
        lambda q, k, v: md.attention(q, k, v, causal=True), "context:8", layout, options=options
    )
    return f.lower(q, k, k)


def told(make, options=None, **layout):
    options = options or Options()
    program = make(options, **layout)
    others = alternatives(program, options, lambda other: make(other, **layout))
    return explain(program, others=others), others


def test_keeping_weights_is_costed_beside_gathering_them_again():
    report, others = told(step)
    as_it_is, keep = report.alternatives
    assert (as_it_is.how, keep.how) == ("as it is", "--weights=keep")
    assert as_it_is.wire_bytes == report.wire_bytes
    assert as_it_is.peak_bytes == report.memory.peak_bytes
    assert as_it_is.seconds == report.timeline.seconds
    assert keep.wire_bytes == others["--weights=keep"].wire_bytes < as_it_is.wire_bytes
    assert keep.peak_bytes == others["--weights=keep"].peak_bytes > as_it_is.peak_bytes
    text, page = str(report), report.html()
    assert "the same step by other options" in text and "--weights=keep" in text
    assert "The same step by other options" in page and "--weights=keep" in page


def test_what_is_kept_is_costed_beside_gathering_again():
    report, _ = told(step, Options(weights="keep"))
    assert [one.how for one in report.alternatives] == ["as it is", "--weights=again"]


def test_ways_to_a_split_memory_are_costed():
    report, others = told(attending, Options(context="gather"))
    assert [*others] == ["--context=auto", "--context=ring", "--context=sums", "--zigzag"]
    assert [one.how for one in report.alternatives] == [  # a gather has nothing to deal out
        "as it is",
        "--context=auto",
        "--context=ring",
        "--context=sums",
    ]


def test_dealing_out_the_work_of_a_ring_is_costed():
    report, _ = told(attending, Options(context="ring"))
    assert "--zigzag" in [one.how for one in report.alternatives]
    again, _ = told(attending, Options(context="ring", zigzag=True))
    assert "--zigzag" not in [one.how for one in again.alternatives]


def test_options_that_change_nothing_are_not_told():
    for report, others in [
        told(step, layout=MEGATRON),  # no weights are stored split
        told(attending, layout="batch:context"),  # the memory is whole
        told(step, Options(memory=2**40)),  # lowering has chosen already
    ]:
        assert others == {} and report.alternatives == ()
        assert "other options" not in str(report) + report.html()


def test_what_time_has_decided_is_costed_there():
    options = Options(hardware="v5p")
    program = step(options)
    assert "weights" in {decision.name for decision in program.decisions}
    assert alternatives(program, options, lambda other: step(other)) == {}
