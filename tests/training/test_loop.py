"""The loop: what it reports and returns, on every layout, and how it ends."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.validate import LayoutWarning
from meshdsl.lowering.options import Options
from meshdsl.optim import AdamW
from meshdsl.training import run as run_module
from meshdsl.training.health.hanging import HangWatch
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.nonfinite import NotFinite, RecentBatches
from meshdsl.training.reporting.time_shares import PARTS
from meshdsl.training.step import make_eval_step
from meshdsl.training.step_metrics import KEYS
from tests.training import classifier
from tests.training.flat import train


def run(batches=None, loss=classifier.loss, optimizer=None, **options):
    """Trains on the numpy backend, which compiles nothing, unless told otherwise."""
    defaults = {"steps": 6, "batch_dims": classifier.BATCH_DIMS, "quiet": True, "backend": "numpy"}
    options = defaults | options
    batches = classifier.endless() if batches is None else batches
    return train(classifier.init, loss, optimizer or AdamW(0.05), batches, **options)


SHARES = {"steps_share", *(f"{part}_share" for part in PARTS)}
MEASURED = {"step_seconds", "tokens_per_second", "tflops_per_device", "host_memory_bytes", *SHARES}


def not_measured(line):
    return {name: value for name, value in line.items() if name not in MEASURED}


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_training_learns():
    result = run(steps=300, log_every=300, backend="jax")
    assert result.losses[0] > 1.0
    assert result.losses[-1] < 0.3
    assert int(result.state.step) == 300


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tf", "numpy"])
def test_losses_do_not_depend_on_the_layout(backend):
    expected = run(steps=20).losses
    for mesh, layout in classifier.LAYOUTS:
        found = run(steps=20, mesh=mesh, layout=layout, backend=backend).losses
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_several_steps_in_a_call_change_no_number(backend):
    once = run(steps=6, log_every=3, eval_batches=classifier.batches(2, seed=9))
    mesh, layout = classifier.LAYOUTS[0]
    many = run(
        steps=6,
        log_every=3,
        steps_per_call=3,
        mesh=mesh,
        layout=layout,
        backend=backend,
        eval_batches=classifier.batches(2, seed=9),
    )
    np.testing.assert_allclose(many.losses, once.losses, atol=2e-6)
    assert [line["step"] for line in many.history] == [3, 6]
    for mine, other in zip(many.history, once.history, strict=True):
        assert not_measured(mine) == pytest.approx(not_measured(other), abs=2e-6)
    assert int(many.state.step) == 6


def test_steps_that_calls_do_not_fill_are_told():
    with pytest.raises(ValueError) as error:
        run(steps=7, log_every=3, eval_every=4, steps_per_call=3)
    assert str(error.value) == (
        "steps_per_call=3: so many steps are done at once, which do not divide steps=7, "
        "eval_every=4"
    )


def test_data_that_ends_within_a_call_tells_the_steps_that_were_done():
    with pytest.raises(ValueError, match="the data ended after 3 of 6 steps"):
        run(classifier.batches(5), steps=6, log_every=3, steps_per_call=3)


def test_batches_that_differ_cannot_go_together():
    small = [{name: array[:4] for name, array in batch.items()} for batch in classifier.batches(1)]
    with pytest.raises(ValueError, match="batches differ: `"):
        run([*classifier.batches(2), *small], steps=3, log_every=3, steps_per_call=3)


def test_the_same_seed_gives_the_same_run():
    assert run(seed=1).losses == run(seed=1).losses
    assert run(seed=1).losses != run(seed=2).losses


def test_batches_may_be_named_arrays():
    batches = map(classifier.named, classifier.endless())
    assert run(batches, batch_dims=None).losses == run().losses


def test_reports_come_every_so_often_and_at_the_end(tmp_path):
    result = run(
        steps=7,
        log_every=3,
        eval_every=5,
        eval_batches=classifier.batches(2, seed=9),
        tokens_per_batch=16,
        workdir=tmp_path,
    )
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [3, 5, 6, 7]
    assert [line["eval_loss"] is not None for line in found] == [False, True, False, True]
    assert len(result.losses) == 7
    assert [line["loss"] for line in found] == [result.losses[n - 1] for n in (3, 5, 6, 7)]
    assert [line["loss"] for line in result.history] == [line["loss"] for line in found]
    for line in found:
        assert set(line) == set(KEYS)
        assert line["step_seconds"] > 0
        assert line["tokens_per_second"] == pytest.approx(16 / line["step_seconds"])


def test_the_evaluation_is_the_average_over_the_held_out_batches():
    held_out = classifier.batches(5, seed=9)
    result = run(eval_batches=held_out, loss=classifier.loss_and_size)
    evaluate = md.jit(make_eval_step(classifier.loss_and_size))
    expected = [
        float(evaluate(result.state.params, classifier.named(batch))["loss"]) for batch in held_out
    ]
    assert result.history[-1]["eval_loss"] == pytest.approx(np.mean(expected), rel=1e-6)
    assert result.history[-1]["eval_size"] == pytest.approx(result.history[-1]["size"], rel=0.3)


def test_without_held_out_batches_nothing_is_evaluated():
    assert all("eval_loss" not in line for line in run(eval_every=2).history)


def test_no_batch_is_taken_that_is_not_used():
    taken = 0

    def counted():
        nonlocal taken
        for batch in classifier.endless():
            taken += 1
            yield batch

    run(counted(), steps=6, log_every=6)
    assert taken == 6


def test_progress_is_shown_unless_it_is_not_wanted(capsys):
    run(steps=4, log_every=2, quiet=False)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown[:-1]] == ["2/4", "4/4"]
    assert shown[-1].startswith("time: ")
    run(steps=4, log_every=2)
    assert capsys.readouterr().out == ""


def test_a_layout_that_does_not_fit_is_told_before_anything_is_allocated(tmp_path):
    held = len(jax.live_arrays())
    with pytest.raises(ValueError, match=r"`hiden:model` names a dim .* mean `hidden`\?"):
        run(mesh="data:2,model:4", layout="batch:data; hiden:model", workdir=tmp_path / "run")
    assert len(jax.live_arrays()) == held
    assert not (tmp_path / "run").exists()


def test_a_scope_that_fits_no_path_is_told_before_anything_is_allocated():
    layout = "batch:data; param/pixel:data"
    with pytest.raises(ValueError, match=r"`param/pixel:data` fits no path .* mean `params/pixel:"):
        run(mesh="data:2", layout=layout, eval_batches=classifier.batches(1))


def test_a_rule_without_effect_is_told_once():
    options = {"mesh": "data:2,model:2", "layout": "batch:data; hidden:model; label:model+data?"}
    run(**options, steps=1)
    options["layout"] = "batch:data; pixel:model; hidden:data?; label:data?; params/pixel:data"
    with pytest.warns(LayoutWarning) as told:
        run(**options, steps=1, eval_batches=classifier.batches(1))
    assert [str(each.message).partition(" takes ")[0] for each in told] == ["`label:data?`"]
    with (
        pytest.warns(LayoutWarning) as told,
        pytest.raises(ValueError, match="from the input batch/image"),  # a step is repeated
    ):
        run(poisoned([1]), **options, steps=1)
    assert [str(each.message).partition(" takes ")[0] for each in told] == ["`label:data?`"]


def test_microbatches_change_nothing_but_the_memory():
    expected = run(steps=8, loss=classifier.loss_and_size)
    for microbatches in (2, 16):
        found = run(
            steps=8,
            loss=classifier.loss_and_size,
            microbatches=microbatches,
            mesh="data:2,model:2",
            layout=classifier.LAYOUT,
        )
        np.testing.assert_allclose(found.losses, expected.losses, atol=2e-6)
        assert found.history[-1]["size"] == pytest.approx(expected.history[-1]["size"], rel=1e-5)


def test_the_batch_dim_can_have_another_name():
    def loss(params, batch):
        return classifier.loss(params, {k: v.rename(row="batch") for k, v in batch.items()})

    dims = {"image": ["row", "pixel"], "answer": ["row"]}
    found = run(steps=3, loss=loss, batch_dims=dims, microbatches=4, batch_dim="row")
    np.testing.assert_allclose(found.losses, run(steps=3).losses, atol=2e-6)


def test_options_reach_the_lowering():
    with pytest.raises(ValueError, match=r"^Recipe: microbatches must be at least 1, got 0$"):
        run(microbatches=0)
    seen = []

    class Seen(Options):
        def __getattribute__(self, name):
            seen.append(name)
            return super().__getattribute__(name)

    run(steps=1, mesh="data:2", layout="batch:data", options=Seen())
    assert "bucket_bytes" in seen


def test_a_mesh_larger_than_the_machine_is_told_with_the_way_out():
    with pytest.raises(ValueError, match=r"mesh data:16 needs 16 devices.*--host_devices=16"):
        run(mesh="data:16", layout="batch:data", backend="jax")


def test_ctrl_c_ends_the_run_after_the_step_with_complete_metrics(tmp_path):
    def interrupted():
        for number, batch in enumerate(classifier.endless(), start=1):
            if number == 8:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted after step 8 of 100$"):
        run(interrupted(), steps=100, log_every=5, workdir=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    assert [line["step"] for line in lines(tmp_path)] == [5, 8]


@pytest.fixture
def heeds_interrupts():
    """Undoes what a shell does to jobs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_second_ctrl_c_ends_it_at_once(tmp_path):
    def interrupted():
        for number, batch in enumerate(classifier.endless(), start=1):
            if number == 8:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with pytest.raises(KeyboardInterrupt):
        run(interrupted(), steps=100, log_every=5, workdir=tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [5]


def test_an_interrupted_evaluation_is_not_reported(tmp_path):
    class Interrupting(list):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 1 and len(lines(tmp_path)) == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield batch

    with pytest.raises(KeyboardInterrupt):
        run(
            steps=100,
            log_every=2,
            eval_every=6,
            eval_batches=Interrupting(classifier.batches(3)),
            workdir=tmp_path,
        )
    found = [(line["step"], line["eval_loss"]) for line in lines(tmp_path)]
    assert found[:3] == [(2, None), (4, None), (6, None)]


def test_data_that_ends_early_is_told_and_what_there_was_is_reported(tmp_path):
    with pytest.raises(ValueError) as error:
        run(classifier.batches(4), steps=6, log_every=3, workdir=tmp_path)
    assert str(error.value) == (
        "the data ended after 4 of 6 steps; give batches without end (itertools.cycle repeats a "
        "list), or fewer steps"
    )
    assert [line["step"] for line in lines(tmp_path)] == [3, 4]


def test_a_batch_of_another_shape_is_told():
    batches = classifier.batches(3)
    batches[2] = {name: array[:8] for name, array in batches[2].items()}
    with pytest.raises(
        ValueError, match=r"batch/image: traced as f32\[batch=16, pixel=12\], given"
    ):
        run(batches, steps=3)


def test_entries_without_names_are_told_together():
    with pytest.raises(ValueError) as error:
        run(batch_dims={"images": ["batch", "pixel"]})
    assert str(error.value) == (
        "batches: entry `image` of a batch has no dim names: give NamedArrays, or Data(batches, "
        "batch_dims={'image': [...]}). Did you mean `images`?; entry `answer` of a batch has no "
        "dim names: give NamedArrays, or Data(batches, batch_dims={'answer': [...]}); `images`, "
        "which batch_dims "
        "has, is not in it"
    )


def test_no_batch_at_all_is_told():
    with pytest.raises(ValueError, match=r"^batches: there is no batch$"):
        run([])
    with pytest.raises(ValueError, match=r"^eval_batches: there is no batch$"):
        run(eval_batches=[])


def test_held_out_batches_that_can_be_read_once_are_refused():
    message = r"^eval_batches can be gone through only once; give a list of batches$"
    with pytest.raises(ValueError, match=message):
        run(eval_batches=iter(classifier.batches(2)))


def test_numbers_out_of_range_are_told_together():
    with pytest.raises(ValueError) as error:
        run(steps=0, steps_per_call=-1)
    assert str(error.value) == (
        "train: steps must be at least 1, got 0; steps_per_call must be at least 1, got -1"
    )
    with pytest.raises(ValueError, match=r"^Reporting: log_every must be at least 1, got -1$"):
        run(log_every=-1)
    with pytest.raises(ValueError, match=r"^Evaluation: eval_every must be at least 1, got 0$"):
        run(eval_every=0)


def poisoned(bad, count=12):
    """Returns batches of which the images of some are not finite, numbered from 1."""
    batches = classifier.batches(count)
    for number in bad:
        batches[number - 1]["image"] = np.full_like(batches[number - 1]["image"], np.nan)
    return batches


def test_a_step_that_is_not_finite_stops_the_run_and_names_the_gradient(tmp_path):
    with pytest.raises(NotFinite) as error:
        run(poisoned([5, 7]), steps=12, log_every=4, workdir=tmp_path)
    assert error.value.step == 5
    assert str(error.value) == (
        "step 5: the loss is nan, and the gradient of w_in is not finite. The update was left out. "
        "nonfinite=skip goes on without such steps. The step was repeated with every operation "
        "checked:\n"
        "the result loss: f32[] is not finite\n"
        "  it comes from the input batch/image: 192 NaN of 192 values in f32[batch=16, pixel=12]"
    )
    first, second = lines(tmp_path)
    assert (first["skipped_steps"], second["skipped_steps"]) == (0, 2)
    assert "first_nonfinite" not in second


def logarithmic(params, batch):
    """The classifier's loss, and the logarithm of an entry that may be negative."""
    return classifier.loss(params, batch) + md.sum(
        md.log(batch["image"])  # here
    )


@pytest.mark.parametrize(("mesh", "layout"), [(None, None), ("data:2", "batch:data")])
def test_a_run_that_stops_names_the_operation_and_its_line(mesh, layout):
    batches = [{**b, "image": np.abs(b["image"]) + 1} for b in classifier.batches(6)]
    batches[3]["image"] = -batches[3]["image"]
    with pytest.raises(ValueError) as error:
        run(batches, steps=6, log_every=6, loss=logarithmic, mesh=mesh, layout=layout)
    source = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(source, 1) if line.endswith("  # here"))
    assert str(error.value).startswith("step 4: the loss is nan")
    assert "first made by log, of finite operands" in str(error.value)
    assert f"test_loop.py:{number}  " in str(error.value)


def test_without_its_batch_the_error_says_how_to_find_the_operation(monkeypatch):
    monkeypatch.setattr(RecentBatches, "of", lambda self, step: None)
    with pytest.raises(ValueError, match=r"check_finite=True\) names the operation$"):
        run(poisoned([2]), steps=4, log_every=4)


def test_the_bytes_of_kept_batches_are_those_of_one_device():
    rows = md.Dimension("rows", 80)
    split = md.place(md.named(np.zeros(80, np.uint8), [rows]), "data:2", "rows:data")
    whole = md.place(md.named(np.zeros(80, np.uint8), [rows]), "data:2", "")
    for array, count in ((split, 2), (whole, 1)):
        recent = RecentBatches(limit=100)
        for step in (1, 2, 3):
            recent.keep(step, {"x": array})
        assert sum(recent.of(step) is not None for step in (1, 2, 3)) == count


def test_the_step_is_repeated_however_long_that_takes(monkeypatch):
    doing = []
    monkeypatch.setattr(HangWatch, "at", lambda self, what: doing.append(what))
    monkeypatch.setattr(run_module, "origin_of", lambda *_: doing.append("repeating"))
    with pytest.raises(ValueError, match="step 2: the loss is nan"):
        run(poisoned([2]), steps=4, log_every=4)
    assert doing[doing.index("repeating") - 1] is None


def test_batches_of_the_last_steps_are_kept_within_a_limit():
    def batch(count):
        return {"x": md.named(np.zeros(count, np.uint8), ["x"])}

    recent = RecentBatches(limit=100)
    for step, size in enumerate([40, 40, 20, 30], 1):
        recent.keep(step, batch(size))
    assert [step for step in range(6) if recent.of(step)] == [2, 3, 4]
    recent.keep(5, batch(101))
    assert [step for step in range(6) if recent.of(step)] == []
    recent.keep(6, batch(100))
    assert recent.of(6)["x"].dims.volume == 100
    recent.clear()
    assert recent.of(6) is None


@pytest.mark.parametrize("at_once", [1, 2])
def test_or_is_skipped_with_a_warning(at_once):
    with pytest.warns(UserWarning, match="the step is skipped") as told:
        result = run(
            poisoned([5, 8]), steps=12, log_every=4, nonfinite="skip", steps_per_call=at_once
        )
    assert [str(one.message).partition(":")[0] for one in told] == ["step 5", "step 8"]
    rest = [batch for n, batch in enumerate(classifier.batches(12), 1) if n not in (5, 8)]
    expected = run(rest, steps=10)
    for name in ("w_in", "bias", "w_out"):
        one, two = (getattr(r.state.params, name) for r in (result, expected))
        np.testing.assert_array_equal(one, two)


def test_half_precision_is_scaled_until_it_fits():
    result = run(
        steps=40,
        log_every=40,
        policy=md.Policy(compute="float16"),
        loss_scaling=LossScaling(2.0**24),
        extra_metrics=["num_zeros", "params_norm"],
        nonfinite="stop",
    )
    (line,) = result.history
    assert line["skipped_steps"] == 1 + np.log2(2.0**24 / line["loss_scale"])  # hysteresis of 2
    assert line["params_norm"] > 0 and line["num_zeros"] == 0
    assert result.losses[-1] < result.losses[0]


@pytest.mark.long
def test_a_mesh_may_be_sizes_or_one_of_jax():
    expected = run(backend="jax").losses
    axes = jax.sharding.AxisType.Auto
    for mesh in ({"data": 2}, jax.make_mesh((2,), ("data",), axis_types=(axes,))):
        found = run(backend="jax", mesh=mesh, layout="batch:data").losses
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (classifier.batches, r"not the function `batches`; call it, as in \w+=batches\(\)"),
        (3, "not a int"),
    ],
)
def test_batches_that_nothing_can_go_through_are_refused(batches, reason):
    for role in ("batches", "eval_batches"):
        with pytest.raises(ValueError, match=f"{role}: batches are an iterable of dicts, {reason}"):
            run(backend="numpy", **{role: batches})


def test_a_batch_that_is_no_dict_is_refused():
    batches = [tuple(batch.values()) for batch in classifier.batches(2)]
    with pytest.raises(ValueError, match=r"batches: a batch is a dict of arrays by name, .* tuple"):
        run(batches, steps=2)


def test_an_entry_under_another_name_is_reported_with_the_one_that_is_missing():
    first, second = classifier.batches(2)
    other = {"image": second["image"], "label": second["answer"]}
    with pytest.raises(ValueError) as error:
        run([first, other], steps=2)
    assert str(error.value) == (
        "batches: entry `label` of a batch has no dim names: give NamedArrays, or Data(batches, "
        "batch_dims={'label': [...]}); `answer`, which batch_dims has, is not in it"
    )


def test_a_batch_with_other_entries_is_told():
    first, second = classifier.batches(2)
    name = next(iter(first))
    other = {**second, "extra": second[name]}
    dims = {**classifier.BATCH_DIMS, "extra": classifier.BATCH_DIMS[name]}
    with pytest.raises(ValueError, match="batch/extra: not expected"):
        run([first, other], batch_dims=dims, steps=2)
    with pytest.raises(
        ValueError, match=r"batches differ: one has \[.*\], one \['answer', 'extra'"
    ):
        run([first, other], batch_dims=dims, steps=2, steps_per_call=2)
