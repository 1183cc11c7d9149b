"""What explain tells of a training step: where every byte is, and who sends what."""

import html
from dataclasses import replace

import jax
import pytest

import meshdsl as md
from meshdsl.lowering.program import COLLECTIVES
from meshdsl.reports.explain.explanation import PARTS, explain, input_part
from meshdsl.reports.explain.values import as_values
from meshdsl.search.changes import Tried
from tests.reports.explain.steps import LARGE, MEGATRON, SMALL, arguments, explained, make_step


def test_inputs_are_told_apart_by_their_paths():
    assert input_part("state/params/mlp/w") == "parameters"
    assert input_part("state/optimizer/mean/params/mlp/w") == "optimizer"
    assert input_part("batch/tokens") == input_part("state/step") == "batch"
    assert input_part("my_params/w") == "batch"


def test_every_parameter_is_listed_with_its_layout_and_bytes():
    _, found = explained()
    by_path = {parameter.path: parameter for parameter in found.parameters}
    assert len(by_path) == 6
    query = by_path["state/params/blocks/query"]
    assert str(query.value.layout) == "heads:model"
    assert query.bytes == 4 * 64 * (4 // 4) * 16 * 4
    assert found.parameter_count == 128 * 64 + 4 * (3 * 64 * 64 + 2 * 64 * 256)


def test_the_parts_add_up_to_the_peak():
    program, found = explained()
    assert set(found.bytes_of) == set(PARTS)
    assert sum(found.bytes_of.values()) == found.memory.peak_bytes == program.peak_bytes
    assert found.bytes_of["parameters"] == sum(p.bytes for p in found.parameters)
    assert found.bytes_of["optimizer"] == found.bytes_of["parameters"]
    assert found.bytes_of["batch"] == 16 // 2 * 32 * 4


def test_gradients_have_the_dims_of_parameters_and_activations_are_what_the_loop_kept():
    _, found = explained()
    scanned = sum(p.bytes for p in found.parameters if "blocks" in p.path)
    assert scanned <= found.bytes_of["gradients"] <= found.bytes_of["parameters"]
    kept = {part.name for part in found.parts if part.part == "activations"}
    assert {"x[layers]", "q[layers]", "h.tanh[layers]"} <= kept


def test_traffic_is_every_collective_of_the_program():
    program, found = explained()
    assert found.wire_bytes == pytest.approx(program.wire_bytes)
    moved = sum(c.count * max(1, len(c.parts)) for c in program.collectives)
    assert sum(t.count for t in found.traffic) == moved
    assert found.collectives == sum(c.count for c in program.collectives) < moved
    payload = sum(c.payload_bytes * c.count for c in program.collectives)
    assert sum(t.payload_bytes for t in found.traffic) == payload
    assert {t.kind for t in found.traffic} <= set(COLLECTIVES)


def test_of_a_cond_both_branches_are_listed_and_the_one_that_sends_more_is_counted():
    def either(x, on):
        def one(x):
            return md.sum(x, "embed")

        def two(x):
            return md.max(x, "embed") * md.min(x, "embed")

        return md.cond(on, one, two, x)

    x = md.spec(md.dims(batch=8, embed=4))
    found = explain(md.jit(either, "model:2", "embed:model").lower(x, md.spec([], "bool")))
    assert sum(t.count for t in found.traffic) == 3
    assert (found.collectives, found.wire_bytes) == (2, 2 * 8 * 4)
    (total,) = [line.split() for line in str(found).splitlines() if line.startswith("  total")]
    assert total == ["total", "2", "64", "B"]


def test_traffic_is_told_by_line_with_the_tensor_and_the_phase():
    _, found = explained()
    told = {(t.source.code[:12], t.phase): t for t in found.traffic if t.axes == ("model",)}
    contracted = told["return x + m", "forward"]
    assert contracted.kind == "all_reduce"
    assert contracted.dims.names == ("batch", "length", "embed")
    assert contracted.count == 4
    assert contracted.payload_bytes == 4 * (8 * 32 * 64 * 4)
    assert contracted.wire_bytes == 2 * 3 / 4 * contracted.payload_bytes
    assert told["h = md.gelu(", "backward"].count == 4
    gradients = [t for t in found.traffic if t.axes == ("data",) and t.dims.find("layers")]
    assert {t.phase for t in gradients} == {"backward"}
    assert {name for t in gradients for name in t.what} >= {"w_in_grad[layers]"}


def test_what_is_computed_again_belongs_to_the_backward_pass():
    _, kept = explained()
    _, again = explained(wrap=md.checkpoint)

    def count(explanation, phase):
        return sum(t.count for t in explanation.traffic if t.phase == phase)

    assert count(again, "forward") == count(kept, "forward")
    assert count(again, "backward") > count(kept, "backward")
    assert again.bytes_of["activations"] < kept.bytes_of["activations"]


def test_large_activations_are_met_with_computing_them_again():
    _, found = explained(batch=512)
    assert "md.checkpoint" in found.advice and "remat=full" in found.advice


def test_activations_of_a_step_that_computes_again_are_met_with_a_split():
    _, found = explained(batch=512, wrap=md.checkpoint)
    assert "remat" not in found.advice
    rule = found.advice.split("`")[-2]
    assert rule.endswith(":model?")
    _, better = explained(batch=512, wrap=md.checkpoint, layout=f"{MEGATRON}; {rule}")
    assert better.memory.peak_bytes < found.memory.peak_bytes


def test_large_optimizer_state_is_met_with_a_storage_layout():
    _, found = explained(batch=2, length=4)
    assert "`optimizer/" in found.advice and ":data`" in found.advice
    rule = found.advice.split("`")[-2]
    _, better = explained(batch=2, length=4, layout=f"{MEGATRON}; {rule}")
    assert better.bytes_of["optimizer"] < found.bytes_of["optimizer"]


def test_one_device_sends_nothing_and_gets_no_advice_to_split():
    _, found = explained(mesh=None, layout=None, batch=2, length=4)
    assert found.traffic == () and found.advice == ""
    assert "on the wire: nothing" in str(found)


def test_the_report_has_the_figures_with_units_and_the_places():
    _, found = explained()
    text = str(found)
    assert text.startswith("train_step on data:2 model:4: 8 devices · 188.4 K parameters · ")
    assert f"layout {MEGATRON}\n" in text
    head = "memory per device, at the peak\n"
    memory = text[text.index(head) + len(head) :].split("\n\n")[0].split("\n")
    labels = [line.split("  ")[1] for line in memory]
    assert labels[:8] == [
        "parameters",
        "optimizer state",
        "batch",
        "gradients",
        "copies",
        "activations",
        "working values",
        "peak",
    ]
    assert "steps.py:" in text
    assert "blocks/query  f32[layers=4, embed=64, heads=1/4, kv=16]" in text
    assert "payload: the larger of what one device gives and gets" in text.replace("\n", " ")


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_the_report_fits_120_columns_and_has_no_trailing_blanks(sizes):
    _, found = explained(**sizes)
    for line in str(found).split("\n"):
        assert len(line) <= 120, line
        assert line == line.rstrip()


def test_many_small_collectives_are_told_as_one_sum():
    def f(params, x):
        return [md.sum(x * p, "batch") for p in params]

    batch, embed = md.dims(batch=8, embed=4)
    params = [md.spec([embed]) for _ in range(30)]
    # One line of the source: the thirty are one group.
    found = explain(md.jit(f, "data:2", "batch:data").lower(params, md.spec([batch, embed])))
    assert len(found.traffic) == 1 and found.traffic[0].count == 30
    assert "+ 29 more" in str(found)


def test_a_program_that_is_no_training_step_can_be_explained():
    batch, embed = md.dims(batch=8, embed=4)
    found = explain(
        md.jit(lambda x: md.sum(x, "batch"), "data:2", "batch:data").lower(md.spec([batch, embed]))
    )
    assert found.parameters == ()
    assert "all_reduce" in str(found)
    assert explain(md.jit(lambda: md.zeros([embed])).lower()).batch is None


def test_a_report_does_not_grow_with_the_model():
    step = md.jit(make_step(), "data:64 model:8", MEGATRON, donate="state")
    program = step.lower(*arguments(**LARGE))
    assert len(list(program.block.walk())) == len(list(explained()[0].block.walk()))
    assert "160.1 B parameters" in str(explain(program))


def test_a_step_that_does_not_fit_keeps_its_labels_and_says_where_to_look():
    program = md.jit(make_step(), "data:64 model:8", MEGATRON, donate="state").lower(
        *arguments(**LARGE)
    )
    tried = [Tried("", 2.0, program.peak_bytes, False), Tried("`a:b`", 1.0, 2**37, False)]
    command = f"meshdsl plan '--layout={MEGATRON}; auto' {'--remat=full ' * 9}"
    found = replace(explain(program, "a100", changes=tried), search=command)
    lines = str(found).splitlines()
    assert f"    {command}" in lines and all(len(x) <= 120 for x in lines if command not in x)
    assert any(line.startswith("  optimizer state ") for line in lines)
    (peak,) = [n for n, line in enumerate(lines) if line.startswith("  peak ")]
    assert "of 80.0 GiB: does not fit; reached at" in " ".join(
        " ".join(lines[peak : peak + 2]).split()
    )
    page = html.unescape(found.html().replace("<wbr>", ""))
    assert found.advice.endswith("None of those tried fits") and "None of those tried fits" in page
    assert f"<code>{command}</code>" in page and as_values(found)["search"] == command
    fits = explain(program, "a100", changes=[*tried, Tried("`b:c`", 1.0, 2**30, True)])
    assert "None of" not in fits.advice and as_values(fits)["search"] == ""


def test_nothing_is_allocated():
    before = jax.live_arrays()  # kept, so that none of other tests' arrays is let go meanwhile
    explained()
    assert len(jax.live_arrays()) == len(before)
