"""What a report says of a pipeline."""

import re
from itertools import pairwise

import pytest

from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.schedule import Schedule
from meshdsl.reports.explain.explanation import explain
from meshdsl.reports.explain.html.gantt import gantt
from tests.lowering.pipelining.steps import DENSE_FIRST, GPT, T5, layers, lower


def text_of(*args, **options):
    return str(explain(lower(*args, **options)))


def report_of(*args, **options):
    return explain(lower(*args, **options)).pipeline


def test_stages_bubble_and_grid_are_shown():
    text = text_of(GPT, 4, "pipe:2", "layers:pipe")
    assert "pipeline layers:pipe: 2 stages of 1 chunk of 2 layers; 4 microbatches" in text
    assert "5 ticks with forward passes, 5 with backward passes; bubble 20.0% of them" in text
    assert "by stage, at most: 3 1" in text
    assert "stage 0   F0 F1  . F2 B0 F3 B1  . B2 B3" in text
    assert "stage 1    . F0 B0 F1 B1 F2 B2 F3 B3  ." in text
    assert "layout layers:pipe\n" in text


@pytest.mark.parametrize(
    ("count", "stages", "advice"),
    [
        (4, 2, "more --microbatches or --pipeline_rounds=2 make"),
        (6, 4, "passes; more --microbatches make"),  # two rounds need 8 layers
        (6, 2, "more --microbatches or --pipeline_rounds=3 make"),  # two would fill up to 8
    ],
)
def test_rounds_are_advised_where_they_fit(count, stages, advice):
    model = layers(GPT, count)
    text = text_of(model, 4, f"pipe:{stages}", "layers:pipe")
    assert advice in text
    if "rounds" in advice:
        rounds = int(advice.split("rounds=")[1][0])
        more = report_of(model, 4, f"pipe:{stages}", "layers:pipe", pipeline_rounds=rounds).running
        assert (more.rounds, more.filling) == (rounds, 0)


def test_rounds_that_fill_up_more_than_fewer_are_told():
    text = text_of(layers(GPT, 5), 4, "pipe:2", "layers:pipe", pipeline_rounds=2)
    assert "5 layers are computed as 4 × 2; with --pipeline_rounds=1 it is 6 for 5" in text


def test_layers_that_fill_chunks_up_are_told():
    text = text_of(layers(GPT, 5), 4, "pipe:2", "layers:pipe")
    assert "16.7% of the layers' work is for none: 5 layers are computed as 2 × 3" in text


def test_stacks_that_are_no_part_of_it_are_told():
    text = text_of(DENSE_FIRST, 4, "pipe:2", "layers:pipe")
    assert "not part of it, computed by every stage: layers=1 of dense_blocks at" in text
    assert "these layers are 37 % of the arithmetic of each stage" in text


def test_what_a_rule_divides_is_told_without_layers_that_it_does_not():
    """Two stages halve what is outside of the layers, and none of the dense layer."""
    model = "deepseek_mini", "layers=5,vocab=2048"
    whole = explain(lower(model, 4, "pipe:2", "layers:pipe"))
    divided = explain(lower(model, 4, "pipe:2", "layers:pipe; vocab:pipe"))
    # Shares of all that a device computes: products of both, against those of the dense layer.
    shares = [p.outside / p.alike for p in (whole.pipeline, divided.pipeline)]
    assert shares[1] == pytest.approx(shares[0] / 2, rel=0.05)
    assert "every stage computes all of it: vocab:pipe divides it" in str(whole)
    assert "as the loss: stages divide it\n" in str(divided)


def test_stacks_that_follow_each_other_are_told():
    text = text_of(T5, 4, "pipe:2", "layers:pipe")
    assert "2 stages of 1 chunk of each of 2 stacks, one after the other; 4 micro" in text
    assert "chunks 0 to 1: 2 layers each of the layers=4 of encoder/blocks at models/" in text
    assert "chunks 2 to 3: 2 layers each of the layers=4 of decoder/blocks at models/" in text
    assert "stage 0   0F0 0F1 2F0 0F2 2F1   . 0F3 2F2 2B0" in text
    assert "bubble 20.0% of them" in text  # as that of one stack


def test_the_step_waits_as_long_as_its_ticks_do():
    report = report_of(GPT, 4, "pipe:2", "layers:pipe")
    assert report.running.bubble == pytest.approx(0.2)
    assert 0.05 < report.step_bubble < 0.2  # the rest of the step does not wait
    assert f"{100 * report.step_bubble:.0f}"[0] in text_of(GPT, 4, "pipe:2", "layers:pipe")


def test_what_stages_send_is_what_their_ticks_send():
    """One microbatch of 2 rows, 8 positions, 16 features: 1 KiB, in each of 11 ticks each way."""
    report = report_of(GPT, 8, "pipe:4", "layers:pipe")
    assert (report.onward_bytes, report.back_bytes) == (11 * 1024, 11 * 1024)
    assert "each stage sends 11.0 KiB to the next one and 11.0 KiB to the one before" in text_of(
        GPT, 8, "pipe:4", "layers:pipe"
    )
    assert "each stage sends 10.0 KiB to the other one" in text_of(GPT, 4, "pipe:2", "layers:pipe")


def test_what_all_stages_compute_is_told_with_the_rule_that_divides_it():
    """The loss has 3 products of 2 * 16 * 32 flops per token; a layer those of its weights, and
    of attention."""
    report = report_of(GPT, 4, "pipe:2", "layers:pipe")
    head, layer = 3 * 2 * 16 * 32, 3 * 2 * (4 * 16 + 2 * 32) * 16 + 3 * 2 * 2 * 8 * 16
    # 4 ticks of 5 have the head; every tick has the two layers of a stage.
    assert report.outside == pytest.approx(4 * head / (4 * head + 5 * 2 * layer), rel=0.05)
    assert "every stage computes all of it: vocab:pipe divides it" in text_of(
        GPT, 4, "pipe:2", "layers:pipe"
    )
    divided = text_of(GPT, 4, "pipe:2", "layers:pipe; vocab:pipe")
    assert "stages divide it, so all have equal work" in divided


def test_buffers_that_stages_do_not_use_are_told():
    spare = report_of(GPT, 4, "pipe:2", "layers:pipe").spare_bytes
    assert spare[0] == 0 < spare[1]  # 3 microbatches' activations, and 1
    text = text_of(GPT, 4, "pipe:2", "layers:pipe")
    assert "each has the memory of the fullest, stage 0, of which others leave up to" in text


def test_buffers_of_several_stacks_are_told_together():
    """Of T5: the encoder's activations wait for the decoder, so each stack has its own number."""
    program = lower(T5, 4, "pipe:2", "layers:pipe")
    report = explain(program).pipeline
    loops = [i for i in program.block.instructions if i.op == "scan"]
    spare = 0
    # Chunks of the encoder are live in 4 and 3 passes at a time, those of the decoder in 3 and 1.
    for stack, (used, unused) in zip(report.running.stacks, ((4, 1), (3, 2)), strict=True):
        of_loops = [[v for v in i.inputs if v.shape.find(stack.kept)] for i in loops]
        largest = max(of_loops, key=len)
        assert {v.shape.get(stack.kept).size for v in largest} == {used}
        spare += unused * sum(v.bytes for v in largest) // used
    assert report.spare_bytes == (0, spare)
    rows = report.running.schedule.rows
    for number, stack in enumerate(report.running.stacks):  # as the grid shows it
        own = [[a for a in row if a and a.chunk // 2 == number] for row in rows]
        assert stack.live == peaks(Schedule.of(own))
    assert "of which others leave up to" in text_of(T5, 4, "pipe:2", "layers:pipe")


def test_another_schedule_is_held_against_the_one_with_the_fewest_ticks():
    text = text_of(GPT, 8, "pipe:4", "layers:pipe", pipeline="zb-h1")
    assert "--pipeline=circular needs fewer passes on a clock: 22, not" in text
    assert "gradients of inputs and of weights are computed in one tick" in text
    assert "needs fewer passes" not in text_of(GPT, 8, "pipe:4", "layers:pipe")


_KINDS = ("forward", "backward")
BARS = re.compile(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)".*?class="(\w+)"')


def test_the_page_draws_every_pass_to_the_scale_of_time():
    report = report_of(GPT, 4, "pipe:2", "layers:pipe")
    first, *lines = str(gantt(report)).split("<svg ")[1:]
    assert 'class="wide"' in first and all('class="narrow"' in line for line in lines)
    for charts in ([first], lines):
        bars = [(n, *bar) for n, chart in enumerate(charts) for bar in BARS.findall(chart)]
        assert len(bars) == 2 * 2 * 4
        widths = {kind: {float(b[3]) for b in bars if b[4] == kind} for kind in _KINDS}
        (forward,), (backward,) = ({round(w, 1) for w in each} for each in widths.values())
        assert backward / forward == pytest.approx(
            report.backward_seconds / report.forward_seconds, rel=0.02
        )
        for row in {(n, y) for n, _, y, _, _ in bars}:  # what a stage does never overlaps
            spans = sorted((float(x), float(w)) for n, x, y, w, _ in bars if (n, y) == row)
            assert all(x + w <= after for (x, w), (after, _) in pairwise(spans))
    chart = str(gantt(report))
    assert chart.count("<title>stage 1: backward pass of chunk 1, microbatch 3</title>") == 2
    page = explain(lower(GPT, 4, "pipe:2", "layers:pipe")).html()
    assert "The pipeline" in page and chart in page


def test_a_long_chart_shows_its_begin():
    chart = str(gantt(report_of(GPT, 256, "pipe:4", "layers:pipe")))
    assert "The first 400 passes of 4 stages are shown" in chart


def test_advice_splits_nothing_over_the_axis_of_the_pipeline():
    text = text_of(GPT, 4, "pipe:2", "layers:pipe")
    assert ":pipe?" not in text
    assert "/embed:pipe" not in text
