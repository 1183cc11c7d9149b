"""The training step and the evaluation step."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.optim import AdamW, Sgd, schedules
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_eval_step, make_train_step
from tests.training import classifier

NAMES = ("w_in", "bias", "w_out")


def fresh(optimizer, mesh=None, layout=None, policy=None):
    return md.jit(create(classifier.init, optimizer, policy), mesh, layout)(md.random.key(0))


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "layout"), classifier.LAYOUTS)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_steps_are_those_of_plain_numpy(mesh, layout, clip_norm):
    optimizer = Sgd(0.2)
    state = fresh(optimizer, mesh, layout)
    step = md.jit(make_train_step(classifier.loss, optimizer, clip_norm), mesh, layout)
    weights = [np.asarray(getattr(state.params, name), "f8") for name in NAMES]
    for batch in classifier.batches(4):
        state, metrics = step(state, classifier.named(batch))
        value, grads = classifier.numpy_loss_and_grads(*weights, batch)
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        scale = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
        weights = [w - 0.2 * scale * g for w, g in zip(weights, grads, strict=True)]
        np.testing.assert_allclose(float(metrics["loss"]), value, rtol=1e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-5)
    assert int(state.step) == 4
    for name, expected in zip(NAMES, weights, strict=True):
        np.testing.assert_allclose(getattr(state.params, name), expected, atol=1e-5)


def test_the_metrics_are_scalars_in_float32_and_follow_the_schedule():
    optimizer = AdamW(schedules.linear(1.0, 0.0, 4))
    state = fresh(optimizer)
    step = md.jit(make_train_step(classifier.loss_and_size, optimizer))
    rates = []
    for batch in classifier.batches(3):
        state, metrics = step(state, classifier.named(batch))
        rates.append(float(metrics["learning_rate"]))
    assert rates == [1.0, 0.75, 0.5]
    assert set(metrics) == {"loss", "grad_norm", "learning_rate", "size"}
    assert all(m.dims == () and m.dtype == np.float32 for m in metrics.values())


def test_the_state_comes_out_with_the_paths_it_came_in_with():
    optimizer = AdamW(0.1)
    spec = spec_of(create(classifier.init, optimizer))
    graph = md.jit(make_train_step(classifier.loss, optimizer)).trace(spec, classifier.BATCH)
    state = [path for path in graph.input_paths if path.startswith("state/")]
    assert list(graph.output_paths[: len(state)]) == state
    assert "state/optimizer/mean/params/w_in" in state


def test_only_gradients_one_norm_and_one_loss_are_reduced():
    optimizer = AdamW(0.1)
    spec = spec_of(create(classifier.init, optimizer))
    step = make_train_step(classifier.loss, optimizer, clip_norm=1.0)
    (joined,) = md.jit(step, "data:8", "batch:data").lower(spec, classifier.BATCH).collectives
    sizes = [4, 4 * 8, 4 * 8 * 4, 4 * 12 * 8]
    assert (joined.kind, joined.payload_bytes, joined.count) == ("all_reduce", sum(sizes), 1)
    alone = md.jit(step, "data:8", "batch:data", options=Options(bucket_bytes=0))
    program = alone.lower(spec, classifier.BATCH)
    assert sorted(c.payload_bytes for c in program.collectives) == sizes


@pytest.mark.long
def test_a_policy_computes_in_its_dtype_and_keeps_the_parameters_in_theirs():
    policy = md.Policy(compute="bfloat16")
    optimizer = Sgd(0.2)
    seen = []

    def loss(params, batch):
        seen.append((params.w_in.dtype.name, batch["image"].dtype.name, batch["answer"].dtype.name))
        return classifier.loss(params, batch)

    (batch,) = classifier.batches(1)
    step = md.jit(make_train_step(loss, optimizer, policy=policy))
    state, metrics = step(fresh(optimizer, policy=policy), classifier.named(batch))
    assert seen == [("bfloat16", "bfloat16", "int32")]
    assert state.params.w_in.dtype == np.float32
    exact, _ = md.jit(make_train_step(classifier.loss, optimizer))(
        fresh(optimizer), classifier.named(batch)
    )
    np.testing.assert_allclose(state.params.w_in, exact.params.w_in, atol=0.01)
    assert metrics["loss"].dtype == np.float32


def test_the_evaluation_step_returns_the_loss_and_what_the_loss_function_adds():
    params = md.jit(classifier.init)(md.random.key(0))
    (batch,) = classifier.batches(1)
    metrics = md.jit(make_eval_step(classifier.loss_and_size))(params, classifier.named(batch))
    weights = [np.asarray(getattr(params, name), "f8") for name in NAMES]
    expected, _ = classifier.numpy_loss_and_grads(*weights, batch)
    np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-5)
    np.testing.assert_allclose(float(metrics["size"]), (weights[0] ** 2).mean(), rtol=1e-5)


def test_what_the_loss_function_adds_must_fit():
    def loss(params, batch):
        return classifier.loss(params, batch), {"bias": params.bias, "grad_norm": params.bias}

    params = spec_of(classifier.init)
    with pytest.raises(ValueError) as error:
        md.jit(make_eval_step(loss)).trace(params, classifier.BATCH)
    assert str(error.value) == (
        "the loss function returns\n"
        "  metric `bias` has dims [hidden=8]; reduce it first, as in md.mean(x), or "
        "give `update`, for which it is\n"
        "  metric `grad_norm` has dims [hidden=8]; reduce it first, as in md.mean(x), or "
        "give `update`, for which it is\n"
        "  metric `grad_norm` has the name of a metric of the run"
    )


def test_what_is_no_metric_is_named_with_its_type():
    def loss(params, batch):
        added = {"none": None, "parts": {"a": params.bias}, "array": np.ones(3), "loss": 1.0}
        return classifier.loss(params, batch), added

    for update in (False, True):  # with one, metrics may have dims, but they are tensors
        with pytest.raises(ValueError) as error:
            md.jit(make_eval_step(loss, None, update)).trace(
                spec_of(classifier.init), classifier.BATCH
            )
        assert str(error.value) == (
            "the loss function returns\n"
            "  metric `none` is of type NoneType; return a tensor or a number\n"
            "  metric `parts` is of type dict; return a tensor or a number\n"
            "  metric `array` is of type ndarray; return a tensor or a number\n"
            "  metric `loss` has the name of a metric of the run"
        )


@pytest.mark.parametrize("name", ["step", "samples", "step_seconds", "eval_loss", "test_accuracy"])
def test_what_reports_have_of_their_own_is_no_name_for_a_metric_of_the_loss(name):
    def loss(params, batch):
        return classifier.loss(params, batch), {name: 1.0}

    reason = "( has the name of a metric of the run|: names that begin with `eval_` or `test_`)"
    with pytest.raises(ValueError, match=f"metric `{name}`{reason}"):
        md.jit(make_eval_step(loss)).trace(spec_of(classifier.init), classifier.BATCH)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_metric_may_be_a_plain_number(microbatches):
    def loss(params, batch):
        return classifier.loss(params, batch), {"heat": 0.5, "count": np.int64(3), "on": True}

    optimizer = AdamW(0.1)
    step = make_train_step(loss, optimizer, microbatches=microbatches)
    state = md.jit(create(classifier.init, optimizer), backend="numpy")(md.random.key(0))
    (batch,) = classifier.batches(1)
    _, metrics = md.jit(step, backend="numpy")(state, classifier.named(batch))
    assert [float(metrics[name]) for name in ("heat", "count", "on")] == [0.5, 3, 1]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda x: md.cast(md.mean(x), "int32"), r"s32\[\], made at .*; cast it, as in [^;]*\. It"),
        (lambda x: md.cast(x, "int32"), r".*; reduce it, as in md.mean\(x\), and cast it, as in"),
        (
            lambda x: md.cast(md.mean(x), "complex64"),
            r".*; take its real part, as in md.real\(x\)\.",
        ),
        (lambda x: x, r"f32\[batch=\d+.*\], made at .*; reduce it, as in md.mean\(x\)"),
        (lambda x: None, "a NoneType"),
        (lambda x: [md.sum(x)], "a list"),
        (lambda x: 3.0, "a float"),
        (lambda x: (md.sum(x), x), "a Tensor beside the loss"),
        (lambda x: (md.sum(x), {}, {}), "a tuple"),
        (lambda x: md.argmax(md.sum(x, "batch"), md.sum(x, "batch").dims[0]), "s32"),
    ],
)
def test_a_loss_that_is_no_scalar_is_told_with_its_line(returned, text):
    def not_a_loss(params, batch):
        return returned(batch["image"])

    step = make_train_step(not_a_loss, AdamW(0.1))
    state = md.jit(create(classifier.init, AdamW(0.1)), backend="numpy")(md.random.key(0))
    place = rf"tests/training/test_step.py:{not_a_loss.__code__.co_firstlineno}"
    with pytest.raises(ValueError, match=rf"`not_a_loss` \({place}\) returns {text}") as error:
        md.jit(step, backend="numpy").trace(state, classifier.BATCH)
    assert "or a pair of that and {name: metric}" in str(error.value)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_no_parameter_reaches_is_an_error(microbatches):
    def loss(params, batch):
        return md.mean(batch["image"]) + md.mean(md.stop_gradient(params.bias))

    step = make_train_step(loss, Sgd(0.1), microbatches=microbatches)
    (batch,) = classifier.batches(1)
    with pytest.raises(ValueError, match="depends on none of the parameters that are trained") as e:
        md.jit(step)(fresh(Sgd(0.1)), classifier.named(batch))
    assert "(`w_in`, `bias`, `w_out`)" in str(e.value)
    assert "test_step.py" in str(e.value)
