"""What the flags of precision, schedules and decay make of a job."""

import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.cli import flags, job
from meshdsl.cli.mistakes.problems import UsageError
from meshdsl.optim import Adafactor, Lion, Muon, Sgd, is_matrix
from meshdsl.reports.explain.explanation import explain
from meshdsl.tensors.dims import Shape
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.state import spec_of


def built(*arguments):
    values, problems = flags.read(["--model=gpt_mini", *arguments])
    return job.build(values, problems)


def refused(*arguments):
    values, problems = flags.read(["--model=gpt_mini", *arguments])
    with pytest.raises(UsageError) as error:
        job.build(values, problems)
    return str(error.value)


def test_a_loss_scale_adapts_in_half_precision_and_there_only():
    assert built().recipe.loss_scaling is None
    assert built("--policy=compute=bfloat16").recipe.loss_scaling is None
    assert built("--policy=compute=float16").recipe.loss_scaling == LossScaling()
    assert built("--model_args=policy=float16").recipe.loss_scaling == LossScaling()
    found = built(
        "--policy=compute=float16",
        "--initial_loss_scale=65536",
        "--min_loss_scale=4",
        "--loss_scale_window=50",
        "--hysteresis=1",
    ).recipe.loss_scaling
    assert found == LossScaling(65536, 50, 1, 4)


@pytest.mark.parametrize("policy", ["float16", "compute=bfloat16"])
def test_a_constant_loss_scale_may_be_given(policy):
    found = built(f"--policy={policy}", "--loss_scale=128").recipe.loss_scaling
    assert found == LossScaling.constant(128)


def test_numbers_for_a_scale_that_is_not_there_are_reported():
    expected = (
        "--loss_scale: --loss_scale_window, --hysteresis are for a scale that adapts, which there "
        "is for --policy=compute=float16 without --loss_scale"
    )
    assert refused("--hysteresis=2", "--loss_scale_window=10") == expected
    constant = ("--policy=float16", "--loss_scale=8")
    assert refused("--hysteresis=2", "--loss_scale_window=10", *constant) == expected
    assert refused("--loss_scale=0") == (
        "--loss_scale: LossScaling: minimum must be in (0, inf), got 0.0"
    )


@pytest.mark.parametrize(
    ("arguments", "theirs"),
    [
        ([], optax.warmup_cosine_decay_schedule(0, 0.5, 4, 40, 0.05)),
        (
            ["--schedule=wsd", "--min_learning_rate=0", "--decay_steps=10"],
            optax.join_schedules(
                [
                    optax.linear_schedule(0, 0.5, 4),
                    optax.constant_schedule(0.5),
                    optax.linear_schedule(0.5, 0, 10),
                ],
                [4, 30],
            ),
        ),
        (["--schedule=constant"], optax.warmup_constant_schedule(0, 0.5, 4)),
    ],
)
def test_the_schedule_is_that_of_optax(arguments, theirs):
    schedule = built("--learning_rate=0.5", "--steps=40", *arguments).recipe.optimizer.learning_rate
    rate = md.jit(lambda step: schedule(step), backend="numpy")
    for step in range(0, 45, 3):
        np.testing.assert_allclose(float(rate(step)), theirs(step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--schedule=linear", "--decay_steps=3"],
            "--decay_steps: only --schedule=wsd has a decay of its own length",
        ),
        (
            ["--schedule=constant", "--min_learning_rate=0"],
            "--min_learning_rate: --schedule=constant stays at its peak; leave it out",
        ),
        (
            ["--min_learning_rate=0.01"],
            "--min_learning_rate: the lowest learning rate, 0.01, is above the peak, 0.001",
        ),
    ],
)
def test_flags_that_do_not_fit_the_schedule_are_reported(arguments, message):
    assert refused(*arguments) == message


def test_parameters_are_excluded_from_decay():
    shape = Shape(md.dims(vocab=8, embed=4))
    assert built().recipe.optimizer.mask is is_matrix
    mask = built("--weight_decay_except=embedding,blocks/*/key").recipe.optimizer.mask
    paths = ("embedding", "unembedding", "blocks/attention/key", "blocks/attention/query")
    assert [mask(path, shape) for path in paths] == [False, True, False, True]


def test_the_step_takes_the_state_that_the_job_creates():
    found = built(
        "--policy=compute=float16",
        "--extra_metrics=num_zeros",
        "--model_args=layers=1,embed=16,heads=2",
    )
    key = md.random.key(0)
    state = md.jit(found.recipe.create_state(), backend="numpy")(key)
    assert float(state.scaling.scale) == 2**32
    batch = {
        name: md.named(np.zeros([8, 4], "int32"), ["batch", "length"]) for name in found.batch_spec
    }
    state, metrics = md.jit(found.recipe.train_step(), backend="numpy")(state, batch)
    assert (int(state.step), int(state.skipped)) == (1, 1)
    assert "num_zeros" in metrics


def test_what_is_not_trained_takes_no_optimizer_state():
    small = "--model_args=layers=1,embed=16,heads=2"

    def held(*arguments):
        found = built(small, *arguments)
        recipe = found.recipe
        state = spec_of(recipe.create_state())
        step = md.jit(recipe.train_step(), backend="numpy")
        parts = explain(step.lower(state, found.batch_spec)).bytes_of
        return parts["parameters"], parts["optimizer"]

    params, optimizer = held()
    assert optimizer == 2 * params
    same, less = held("--trainable=blocks/attention,final_norm")
    assert same == params and 0 < less < optimizer / 4


def test_patterns_of_trainable_parameters_that_match_nothing_are_reported():
    found = built("--trainable=blocks/atention", "--model_args=layers=1,embed=16,heads=2")
    with pytest.raises(ValueError, match=r"trainable: no parameter is meant by .* Did you mean"):
        spec_of(found.recipe.create_state())


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [("adafactor", Adafactor, 0.25), ("lion", Lion, 0.5), ("muon", Muon, 0.9), ("sgd", Sgd, 0.5)],
)
def test_an_optimizer_is_chosen_by_name_and_explain_has_its_memory(name, kind, share):
    small = "--model_args=layers=1,embed=128,heads=2,d_ff=256"

    def held(*arguments):
        found = built(small, *arguments)
        step = md.jit(found.recipe.train_step(), backend="numpy")
        state = spec_of(found.recipe.create_state())
        return found, explain(step.lower(state, found.batch_spec)).bytes_of["optimizer"]

    found, taken = held(f"--optimizer={name}", "--weight_decay=0.2", "--weight_decay_except=query")
    assert isinstance(found.recipe.optimizer, kind) and found.recipe.optimizer.weight_decay == 0.2
    assert taken <= share * held()[1]


def test_an_optimizer_that_there_is_not_is_reported():
    assert refused("--optimizer=mion").startswith("--optimizer: unknown choice 'mion'; choose one")
