"""Which loops a layout makes a pipeline, and what is said where it cannot."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.lowering.options import Options
from meshdsl.lowering.pipelines.checks.checking import check
from meshdsl.optim import Sgd
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_eval_step, make_train_step
from tests.lowering.pipelining.steps import DENSE_FIRST, GPT, layers, lower, problem


def test_a_step_without_microbatches_is_told_how_to_get_them():
    with pytest.raises(ValueError, match="--microbatches=8") as caught:
        lower(GPT, 1, "pipe:2", "layers:pipe")
    text = str(caught.value)
    assert "`layers:pipe` makes a pipeline of the layers=4 of the loop at models/" in text
    assert "`params/layers:pipe`" in text


def test_parameters_may_be_split_by_layers_without_a_pipeline():
    program = lower(GPT, 4, "pipe:2", "params/layers:pipe")
    assert program.pipeline is None
    assert any("no pipeline" in note for note in program.notes)


def test_the_user_may_have_no_pipeline():
    expected = lower(GPT, 1, "pipe:2", "params/layers:pipe; optimizer/layers:pipe")
    for microbatches in (1, 4):
        program = lower(GPT, microbatches, "pipe:2", "layers:pipe", pipeline="none")
        assert program.pipeline is None
        assert any("this is no pipeline" in note for note in program.notes)
    assert lower(GPT, 1, "pipe:2", "layers:pipe", pipeline="none").flops == expected.flops


@pytest.mark.parametrize("layout", ["layers:pipe?", "", "layers:-", "batch:pipe"])
def test_without_the_rule_there_is_no_pipeline(layout):
    assert lower(GPT, 4, "pipe:2", layout).pipeline is None


@pytest.mark.long
def test_programs_without_a_pipeline_do_not_load_what_makes_them():
    code = """
import sys, meshdsl as md
a = md.Dimension("a", 4)
md.jit(lambda x: x + 1, "d:2", "a:d", "numpy").lower(md.spec([a]))
sys.exit("meshdsl.lowering.pipelining.rewriting" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_loop_over_positions_is_no_pipeline():
    length, features = md.dims(length=4, features=2)

    def step(w, x):
        def loss(w):
            end, _ = md.scan(lambda h, x: (md.tanh(w * h + x), None), x["length", 0], x, "length")
            return md.mean(end)

        return md.grad(loss)(w)

    w = md.named(np.ones(2), [features])
    x = md.named(np.ones((2, 4)), [features, length])
    program = md.jit(step, "pipe:2", "length:pipe", "numpy").lower(w, x)
    assert program.pipeline is None


def test_microbatches_may_not_be_split_among_stages():
    with pytest.raises(ValueError, match="splits the microbatches over an axis of the pipeline"):
        lower(GPT, 4, "pipe:2", "layers:pipe; microbatch:pipe")


def test_what_is_not_finite_is_found_in_a_pipeline():
    step, state, data, _ = problem(GPT, 4)
    huge = jax.tree.map(
        lambda x: md.named(np.asarray(x) * np.float32(1e38), x.dims),
        state.params,
        is_leaf=lambda x: isinstance(x, md.NamedArray),
    )
    jitted = md.jit(step, "pipe:2", "layers:pipe", "numpy", check_finite=True)
    with pytest.raises(FloatingPointError, match=r"first made by .* microbatch"):
        jitted(dataclasses.replace(state, params=huge), data)


def test_an_axis_of_one_device_makes_no_pipeline():
    assert lower(GPT, 4, "pipe:1,data:2", "layers:pipe; batch:data").pipeline is None


def test_an_evaluation_step_is_no_pipeline():
    model = models.load(*GPT)
    _, state, data, _ = problem(GPT, 4)
    step = md.jit(make_eval_step(model.loss), "pipe:2", "layers:pipe", "numpy")
    assert step.lower(state.params, data).pipeline is None
    alone = md.jit(make_eval_step(model.loss), backend="numpy")
    assert float(step(state.params, data)["loss"]) == pytest.approx(
        float(alone(state.params, data)["loss"]), rel=1e-6
    )


def test_all_reasons_are_told_at_once():
    with pytest.raises(ValueError, match="makes no pipeline") as caught:
        lower(GPT, 4, "pipe:8", "layers:pipe; batch:pipe?")
    text = str(caught.value)
    assert "layers=4 are fewer than one per stage: there are 8 stages" in text
    assert "`batch:pipe?` splits `batch` inside of the layers" in text


def test_a_stage_that_would_print_is_refused_with_the_line():
    layers, width = md.dims(layers=4, width=3)

    def loss(params, batch):
        def layer(x, w):
            md.print("mean {}", md.mean(x))
            return md.tanh(x * w), None

        x, _ = md.scan(layer, batch["x"], params["w"], dim="layers")
        md.print("loss {}", md.mean(x))
        return md.mean(md.square(x))

    make = create(lambda key: {"w": md.random.normal(key, [layers, width])}, Sgd(0.1))
    batch = {"x": md.spec(md.dims(batch=4, width=3), "float32")}
    step = make_train_step(loss, Sgd(0.1), microbatches=2)
    with pytest.raises(ValueError, match="makes no pipeline") as caught:
        md.jit(step, "pipe:2", "layers:pipe", "numpy").lower(spec_of(make), batch)
    lines = [line for line in str(caught.value).splitlines() if "a stage cannot print" in line]
    assert len(lines) == 2 and all("test_finding.py" in line for line in lines)


def test_rounds_need_as_many_layers():
    with pytest.raises(ValueError, match="there are 2 stages, and 3 rounds"):
        lower(GPT, 4, "pipe:2", "layers:pipe", pipeline_rounds=3)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"pipeline_rounds": 2}, "Take --pipeline_rounds=1, or at most 2 devices along pipe, or"),
        ({"pipeline": "interleaved"}, "Take --pipeline_rounds=1, or"),
        ({"pipeline": "zbv"}, "Take another schedule, as --pipeline=circular --pipeline_rounds=1"),
    ],
)
def test_fewer_rounds_are_advised_where_layers_do_not_suffice_for_more(options, fix):
    with pytest.raises(ValueError, match="layers=4 are fewer") as caught:
        lower(GPT, 4, "pipe:4", "layers:pipe", **options)
    assert fix in str(caught.value)


def test_stacks_of_which_each_is_too_short_are_told_so():
    with pytest.raises(ValueError, match="so that a stack of the model has 2") as caught:
        lower(layers(DENSE_FIRST, 2), 4, "pipe:2", "layers:pipe")
    assert "at most 1" not in str(caught.value)


def test_options_of_pipelines_without_one_are_told():
    with pytest.warns(UserWarning, match="pipeline=gpipe has no effect.*layers:"):
        lower(GPT, 4, "data:2", "batch:data", pipeline="gpipe")
    with pytest.warns(UserWarning, match="pipeline_rounds=2 has no effect"):
        lower(GPT, 4, "data:2", "batch:data", pipeline_rounds=2)


def test_stacks_follow_each_other_on_the_same_stages():
    pipeline = lower(("t5_mini", "layers=4,vocab=32"), 4, "pipe:2", "layers:pipe").pipeline
    assert [(stack.layers, stack.per_chunk) for stack in pipeline.stacks] == [(4, 2), (4, 2)]
    assert not pipeline.also
    check(pipeline.schedule)  # a microbatch leaves the encoder before the decoder reads it


def test_a_stack_that_is_no_longer_by_division_is_computed_by_every_stage():
    """One dense layer: a stage would compute as much of it with a stage of its own."""
    pipeline = lower(("deepseek_mini", "layers=5,vocab=32"), 4, "pipe:2", "layers:pipe").pipeline
    assert [stack.layers for stack in pipeline.stacks] == [4]
    assert len(pipeline.also) == 1
    assert "layers=1 of dense_blocks at models/layers/block.py" in pipeline.also[0]


def test_stages_divide_the_work_of_all_stacks():
    def flops(*mesh):
        return lower(("t5_mini", "layers=4,vocab=32,d_ff=512"), 8, *mesh).flops

    # 2 microbatches' worth of ticks are idle: (m + p - 1) / m of the work, on p devices.
    assert flops("pipe:2", "layers:pipe") < 0.65 * flops("pipe:1", "")


def test_a_schedule_for_a_model_without_a_stack_is_told():
    batch, embed = md.dims(batch=8, embed=4)

    def loss(w, x):
        return md.mean(md.square(md.einsum(w, x, over="embed")))

    step = make_train_step(loss, Sgd(0.1), microbatches=4)
    state = spec_of(create(lambda key: md.random.normal(key, [embed]), Sgd(0.1)))
    x = md.spec([batch, embed], "float32")
    jitted = md.jit(step, "data:2", "batch:data", options=Options(pipeline="gpipe"))
    with pytest.warns(UserWarning, match="pipeline=gpipe has no effect: the model has no stack of"):
        jitted.lower(state, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": "gpip"}, "Did you mean `gpipe`"),
        ({"pipeline_rounds": 0}, "pipeline_rounds is a number from 1"),
        ({"pipeline_rounds": 1.5}, "pipeline_rounds is a number from 1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_a_schedule_with_its_own_rounds_is_told():
    with pytest.raises(ValueError, match="has 1 chunk per stage, not 2"):
        lower(layers(GPT, 8), 4, "pipe:2", "layers:pipe", pipeline="gpipe", pipeline_rounds=2)


@pytest.mark.long
def test_xla_says_that_it_makes_no_pipeline():
    step, _, data, spec = problem(GPT, 4)
    jitted = md.jit(step, "pipe:2", "layers:pipe", "jax_auto")
    with pytest.warns(UserWarning, match="`layers:pipe` makes no pipeline on backend jax_auto"):
        program = jitted.lower(spec, data)
    assert any("no pipeline on backend jax_auto" in note for note in program.notes)
    asked = md.jit(step, "pipe:2", "layers:pipe", "jax_auto", options=Options(pipeline="none"))
    asked.lower(spec, data)  # without a warning, which would be an error here
