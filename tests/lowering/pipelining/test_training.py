"""What else a training step does: in a pipeline, with the numbers of the step without one."""

import dataclasses
import re

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.lowering.options import Options
from meshdsl.optim import Sgd
from meshdsl.training import Data, Evaluation, Recipe, Reporting
from meshdsl.training.batch_ramp import BatchRamp
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.data import Arrays, shuffled_batches
from meshdsl.training.loop import train
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.state import create
from meshdsl.training.step import make_train_step
from tests.lowering.pipelining.steps import GPT, check_close, check_same, leaves, lower, problem

NARROW = "gpt_mini", "layers=4,embed=8,heads=2,d_ff=16,vocab=32"


# Precision.


def stepped(step, state, data, mesh=None, layout=None, count=1, **options):
    """Returns what each of some steps returns."""
    jitted = md.jit(step, mesh, layout, "numpy", options=Options(**options))
    results = []
    for _ in range(count):
        results.append(jitted(state, data))
        state = results[-1].state
    return results


@pytest.mark.long
def test_a_loss_scale_grows_and_falls_alike():
    """The first scale overflows float16, so the first step changes nothing but the scale."""
    scaling = LossScaling(2.0**24, growth_interval=1, hysteresis=1)
    model, (_, _, data, _) = models.load(*GPT), problem(GPT, 4)
    step = make_train_step(
        model.loss, Sgd(0.1), policy="params=float32,compute=float16", microbatches=4,
        loss_scaling=scaling,
    )  # fmt: skip
    start = md.jit(create(model.init, Sgd(0.1), loss_scaling=scaling), backend="numpy")
    state = start(md.random.key(0))
    expected = stepped(step, state, data, count=9)
    found = stepped(step, state, data, "pipe:2", "layers:pipe", count=9, pipeline_rounds=2)
    skipped = [int(result.state.skipped) for result in expected]
    assert skipped[0] == 1 and skipped[-1] < 9  # both kinds of steps occur
    for one, other in zip(found, expected, strict=True):
        assert int(one.state.skipped) == int(other.state.skipped)
        assert float(one.metrics["loss_scale"]) == float(other.metrics["loss_scale"])
        # Another order of sums in float32 may round some numbers of float16 to their neighbours.
        check_close(one.state.params, other.state.params, 1e-3)


@pytest.mark.parametrize("rounds", [1, 2])
def test_gradients_of_bfloat16_are_added_up_in_float32(rounds):
    """So their error is that of the step without a pipeline, whatever the order of the sums."""
    model, (_, state, data, _) = models.load(*GPT), problem(GPT, 8)

    def gradients(compute, *how, **options):
        policy = f"params=float32,compute={compute}"
        step = make_train_step(model.loss, Sgd(0.1, momentum=0.9), policy=policy, microbatches=8)
        return leaves(stepped(step, state, data, *how, **options)[0].state.optimizer)

    exact, alone = gradients("float64"), gradients("bfloat16")
    found = gradients("bfloat16", "pipe:2", "layers:pipe", pipeline_rounds=rounds)
    for path, values in exact.items():
        error, usual = (np.linalg.norm(each[path] - values) for each in (found, alone))
        assert error <= 1.1 * usual + 1e-7 * np.linalg.norm(values), path
    step = make_train_step(model.loss, Sgd(0.1), policy="compute=bfloat16", microbatches=8)
    jitted = md.jit(step, "pipe:2", "layers:pipe", options=Options(pipeline_rounds=rounds))
    state = md.jit(create(model.init, Sgd(0.1)), backend="numpy")(md.random.key(0))
    program = jitted.lower(state, data)
    carried = [v for i in program.block.instructions if i.op == "scan" for v in i.outputs]
    sums = [v for v in carried if v.shape.find("layers_of_chunk") and not v.shape.find("kept")]
    assert sums and {v.dtype.name for v in sums} == {"float32"}


# Gradients of all stages.


@pytest.mark.parametrize(("mesh", "rounds"), [("pipe:4", 1), ("pipe:2", 2)])
def test_the_norm_is_that_of_the_gradients_of_all_stages(mesh, rounds):
    model, (_, state, data, _) = models.load(*GPT), problem(GPT, 4)
    plain = make_train_step(model.loss, Sgd(1.0), microbatches=4)
    (before,) = stepped(plain, state, data)
    old, new = leaves(state.params), leaves(before.state.params)
    gradients = {path: old[path] - new[path] for path in old}
    norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
    limit = norm / 3
    step = make_train_step(model.loss, Sgd(1.0), microbatches=4, clip_norm=limit)
    (found,) = stepped(step, state, data, mesh, "layers:pipe", pipeline_rounds=rounds)
    assert float(found.metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    for path, values in leaves(found.state.params).items():
        np.testing.assert_allclose(old[path] - values, gradients[path] / 3, atol=1e-6 * limit)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    "stored", ["optimizer/embed:data", "optimizer/embed:data; gradients/embed:data"]
)
def test_optimizer_state_and_gradients_may_be_stored_split(stored, rounds):
    """ZeRO-1 and ZeRO-2, each without splitting parameters."""
    how = ("pipe:2,data:2", f"layers:pipe; batch:data; {stored}")
    check_same(GPT, 4, *how, pipeline_rounds=rounds)
    program = lower(GPT, 4, *how, pipeline_rounds=rounds)
    inputs = {
        path: value.layout.axes("embed")
        for path, value in zip(program.input_paths, program.block.inputs, strict=True)
        if value.shape.find("embed")
    }
    assert {axes for path, axes in inputs.items() if path.startswith("state/optimizer")} == {
        ("data",)
    }
    assert {axes for path, axes in inputs.items() if path.startswith("state/params")} == {()}


@pytest.mark.parametrize("remat", ["keep_collectives", "names:mlp_hidden+attention_out"])
def test_what_is_kept_may_be_chosen(remat):
    model = GPT[0], f"{GPT[1]},remat={remat}"
    check_same(model, 4, "pipe:2,model:2", "layers:pipe; heads:model", pipeline_rounds=2)


def test_stages_on_other_slices_send_over_the_slow_network():
    how = ("pipe@dcn:2,data:2", "layers:pipe; batch:data; vocab:pipe")
    check_same(GPT, 4, *how, pipeline_rounds=2)
    sent = lower(GPT, 4, *how).collectives
    assert {c.kind for c in sent if "pipe" in c.axes} >= {"permute"}
    assert all(c.axes == ("pipe",) for c in sent if c.kind == "permute")


# What is not finite.


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "rounds"), [("pipe:4", 1), ("pipe:2", 2)])
def test_what_is_not_finite_is_named_as_without_a_pipeline(mesh, rounds):
    """The attention of layer 3, which is on another stage than the first one, overflows."""
    step, state, data, _ = problem(GPT, 4)
    attention = state.params.blocks.attention
    query = np.array(attention.query)
    query[3] *= 1e38
    blocks = dataclasses.replace(
        state.params.blocks,
        attention=dataclasses.replace(attention, query=md.named(query, attention.query.dims)),
    )
    broken = dataclasses.replace(state, params=dataclasses.replace(state.params, blocks=blocks))

    def told(*how, **options):
        jitted = md.jit(step, *how, check_finite=True, options=Options(**options))
        with pytest.raises(FloatingPointError) as caught:
            jitted(broken, data)
        return re.search(r"first made by (\w+), .*? at (\S+:\d+)", str(caught.value), re.S)

    alone = told(None, None, "numpy")
    found = told(mesh, "layers:pipe", "numpy", pipeline_rounds=rounds)
    assert alone and found and found.groups() == alone.groups()


# Runs.


def batches(model, rows=16, count=6):
    """Returns batches of random tokens, as a user gives them."""
    rng = np.random.default_rng(1)
    specs = model.batch_spec(rows, 8)
    return [
        {
            key: md.named(rng.integers(0, 32, spec.dims.sizes).astype("int32"), spec.dims)
            for key, spec in specs.items()
        }
        for _ in range(count)
    ]


def run(model, mesh, layout, rounds=None, workdir=None, data=None, steps=4, evaluates=None, **more):
    """Trains a model on the numpy backend."""
    loaded = models.load(*model)
    return train(
        Recipe(loaded.init, loaded.loss, Sgd(0.05, momentum=0.9), microbatches=4, clip_norm=1.0),
        data or Data(batches(loaded)),
        steps=steps,
        mesh=mesh,
        layout=layout,
        backend="numpy",
        options=Options(pipeline_rounds=rounds),
        workdir=workdir,
        evaluation=Evaluation(batches(loaded, count=2)) if evaluates else None,
        reporting=Reporting(log_every=2, quiet=True),
        **more,
    )


def test_several_steps_per_call_are_the_same_steps():
    expected = run(NARROW, None, None)
    found = run(NARROW, "pipe:2", "layers:pipe", 2, steps_per_call=2)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    check_close(found.state, expected.state, 5e-6)


def test_batches_grow_in_a_pipeline():
    model = models.load(*NARROW)
    rows = {
        k: np.concatenate([np.asarray(b[k]) for b in batches(model)]) for k in batches(model)[0]
    }

    def data():
        dims = {key: spec.dims.names for key, spec in model.batch_spec(16, 8).items()}
        return Data(
            shuffled_batches(Arrays(rows), 16, seed=0), dims, batch_ramp=BatchRamp(8, 4, 24)
        )

    expected = run(NARROW, None, None, data=data())
    found = run(NARROW, "pipe:2", "layers:pipe", 2, data=data())
    assert [line["batch_size"] for line in found.history] == [
        line["batch_size"] for line in expected.history
    ]
    assert len({line["batch_size"] for line in found.history}) > 1
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    check_close(found.state, expected.state, 5e-6)


def test_a_run_evaluates_without_a_pipeline():
    expected = run(NARROW, None, None, evaluates=True)
    found = run(NARROW, "pipe:2", "layers:pipe", 2, evaluates=True)
    losses = [
        [line["eval_loss"] for line in r.history if "eval_loss" in line] for r in (found, expected)
    ]
    assert losses[0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "layout", "rounds"),
    [("pipe:4", "layers:pipe", 1), (None, None, None), ("data:2", "batch:data", None)],
)
def test_a_checkpoint_is_read_on_any_number_of_stages_bit_for_bit(mesh, layout, rounds, tmp_path):
    saved = run(NARROW, "pipe:2", "layers:pipe", 2, tmp_path, steps=2, saving=Saving())
    # A run that has nothing to do left returns the state that it has read.
    read = run(NARROW, mesh, layout, rounds, tmp_path, steps=2, saving=Saving())
    one, other = leaves(saved.state), leaves(read.state)
    assert one.keys() == other.keys() and any("optimizer" in path for path in one)
    assert all(np.array_equal(one[path], other[path]) for path in one)
    # And it goes on as a run that was never stopped.
    rest = run(NARROW, mesh, layout, rounds, tmp_path, steps=4, saving=Saving())
    check_close(rest.state, run(NARROW, None, None).state, 5e-6)
