"""Runs that were stopped go on to the same losses, on any mesh, whatever stopped them."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from meshdsl.training.checkpointing.checkpoints import Checkpoints, CheckpointWarning
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.data import DataFiles, shuffled_batches
from meshdsl.training.reporting.metrics import MetricsWarning, MetricsWriter
from meshdsl.training.stopping import Stopped, Stops
from tests.training import classifier
from tests.training.checkpointing.test_checkpoints import flip, largest, steps_in

STEPS = 8
MESHES = [
    (None, None),
    ("data:8", "batch:data; params/pixel:data"),
    ("data:2,model:4", classifier.LAYOUT),
]


def run(workdir=None, batches=None, **options):
    return classifier.run(workdir, batches, **{"steps": STEPS, "log_every": 2} | options)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_losses_are_those_of_a_run_that_was_never_stopped(backend, at_once, tmp_path):
    options = {
        "backend": backend,
        "mesh": "data:2,model:4",
        "layout": classifier.LAYOUT,
        "steps_per_call": at_once,
    }
    whole = run(**options)
    first = run(tmp_path, saving=Saving(every=2), stops=Stops(at_step=4), **options)
    assert (first.step, len(first.losses)) == (4, 4)
    second = run(tmp_path, saving=Saving(every=2), **options)
    assert second.step == STEPS
    assert first.losses + second.losses == whole.losses
    assert [line["step"] for line in lines(tmp_path)] == [2, 4, 6, 8]
    assert steps_in(tmp_path / "checkpoints") == [4, 6, 8]


@pytest.mark.long
def test_it_goes_on_with_another_mesh_and_layout(tmp_path):
    whole = run(backend="jax")
    found = []
    for (mesh, layout), at in zip(MESHES, [2, 5, STEPS], strict=True):
        one = run(
            tmp_path,
            mesh=mesh,
            layout=layout,
            backend="jax",
            saving=Saving(),
            stops=Stops(at_step=at),
        )
        found += one.losses
    np.testing.assert_allclose(found, whole.losses, atol=2e-6)


@pytest.mark.long
def test_it_goes_on_from_one_backend_to_another(tmp_path):
    whole = run()
    found = run(tmp_path, saving=Saving(), stops=Stops(at_step=3)).losses
    found += run(
        tmp_path,
        saving=Saving(),
        stops=Stops(at_step=6),
        backend="jax",
        mesh="data:8",
        layout="batch:data",
    ).losses
    found += run(tmp_path, saving=Saving(), backend="tf", mesh="data:2", layout="batch:data").losses
    np.testing.assert_allclose(found, whole.losses, atol=2e-6)


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_data_goes_on_where_it_was(kind, tmp_path):
    def batches():
        if kind == "ours":
            return shuffled_batches(classifier.examples(), classifier.batch.size, 3)
        return itertools.cycle(classifier.batches(5))

    whole = run(batches=batches())
    first = run(tmp_path, batches(), saving=Saving(), stops=Stops(at_step=3))
    second = run(tmp_path, batches(), saving=Saving())
    assert first.losses + second.losses == whole.losses


def test_data_that_changes_in_place_is_named_and_used_only_if_overridden(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a text")

    def go_on(at_step=None, override=False):
        saving = Saving(data=DataFiles([text]), override=override)
        return run(tmp_path / "work", saving=saving, stops=Stops(at_step=at_step))

    go_on(3)
    go_on(4)
    times = text.stat()
    text.write_text("A text")
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=r"text.txt has other bytes than before, between 0 and 6"):
        go_on()
    with pytest.warns(UserWarning, match=r"going on with other settings: .*text.txt has other"):
        go_on(6, override=True)
    assert go_on().step == STEPS


def test_a_gap_in_the_metrics_is_reported(tmp_path):
    run(tmp_path, saving=Saving(), stops=Stops(at_step=5), log_every=1)
    file = tmp_path / "metrics.jsonl"
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:2] + kept[4:]))
    with pytest.warns(MetricsWarning, match=r"3 of the 5 reports up to step 5.* from step 2 to 5"):
        run(tmp_path, saving=Saving(), stops=Stops(at_step=6), log_every=1)
    file.unlink()
    with pytest.warns(MetricsWarning, match=r"0 of the 6 reports up to step 6.* from step 0 to 6"):
        run(tmp_path, saving=Saving(), log_every=4)


def test_a_newest_checkpoint_that_is_gone_is_reported(tmp_path):
    run(tmp_path, saving=Saving(every=2), stops=Stops(at_step=6))
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    gone = r"the newest checkpoint was of step 6, and its folder .*6 is gone; the run goes on from"
    with pytest.warns(CheckpointWarning, match=f"{gone} step 4"):
        run(tmp_path, saving=Saving(every=2), stops=Stops(at_step=6))
    for step in (2, 4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    with pytest.warns(CheckpointWarning, match=r"6 is gone; the run starts anew"):
        run(tmp_path, saving=Saving(every=2))


def test_a_folder_of_checkpoints_that_is_gone_is_reported(tmp_path):
    run(tmp_path, saving=Saving(every=2), stops=Stops(at_step=4))
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.warns(CheckpointWarning, match=r"of step 4.* is gone; the run starts anew"):
        run(tmp_path, saving=Saving(every=2))


def test_what_was_reported_after_the_checkpoint_is_reported_again(tmp_path):
    run(tmp_path, saving=Saving(every=4), stops=Stops(at_step=6), steps=STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        flip(largest(tmp_path / "checkpoints" / "6"))
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "lo')  # a kill has cut it off
        second = run(tmp_path, saving=Saving(every=4))
    assert len(second.losses) == STEPS - 4
    assert [line["step"] for line in lines(tmp_path)] == [2, 4, 6, 8]
    assert not (tmp_path / "metrics.1.jsonl").exists()


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    run(tmp_path, saving=Saving())
    again = run(tmp_path, saving=Saving())
    assert (again.step, again.losses) == (STEPS, [])


def test_the_best_is_kept_by_the_loss_on_held_out_batches(tmp_path):
    held_out = classifier.batches(2, seed=9)
    result = run(
        tmp_path,
        steps=6,
        eval_every=1,
        log_every=1,
        eval_batches=held_out,
        saving=Saving(every=1, keep=1),
    )
    best = min(result.history, key=lambda line: line["eval_loss"])["step"]
    assert steps_in(tmp_path / "checkpoints") == sorted({best, 6})


def test_local_checkpoints_are_taken_up(tmp_path):
    saving = Saving(every=4, local=tmp_path / "local", local_every=1)
    whole = run()
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "work", failing(6), saving=saving)
    assert steps_in(tmp_path / "work" / "checkpoints") == [4]
    assert steps_in(tmp_path / "local" / "process.0") == [6]
    second = run(tmp_path / "work", saving=saving)
    assert second.losses == whole.losses[6:]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_run_goes_on_from_the_last_step_that_it_has_copied(at_once, tmp_path):
    saving = Saving(every=8, host_copies=tmp_path / "copies")
    whole = run(steps_per_call=at_once)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "work", failing(6), saving=saving, steps_per_call=at_once)
    assert not steps_in(tmp_path / "work" / "checkpoints")
    last = 6 - 6 % at_once
    assert max(steps_in(tmp_path / "copies" / "process.0")) == last
    second = run(tmp_path / "work", saving=saving, steps_per_call=at_once)
    assert second.losses == whole.losses[last:]
    assert not (tmp_path / "copies").exists()


def failing(after):
    for number, batch in enumerate(classifier.endless()):
        if number == after:
            raise ZeroDivisionError
        yield batch


def test_other_settings_are_shown_and_taken_only_if_overridden(tmp_path):
    run(
        tmp_path,
        saving=Saving(config={"learning_rate": "0.05", "data": "a"}),
        stops=Stops(at_step=2),
    )
    other = {"learning_rate": "0.1", "seed": "1", "data": "a"}
    with pytest.raises(ValueError, match="is of a job with other settings") as error:
        run(tmp_path, saving=Saving(config=other))
    assert str(error.value).splitlines()[1:] == [
        "  learning_rate: 0.05 in the checkpoint, 0.1 here",
        "  seed: none in the checkpoint, 1 here",
    ]
    with pytest.raises(ValueError, match="stop early with --exit_at_step, or Stops"):
        run(tmp_path, saving=Saving(config={**other, "steps": "9"}))
    told = r"other settings: learning_rate: 0\.05 in the checkpoint, 0\.1 here; seed: none"
    with pytest.warns(UserWarning, match=told):
        assert run(tmp_path, saving=Saving(config=other, override=True)).step == STEPS


def test_without_resuming_an_earlier_run_is_not_written_over(tmp_path):
    run(tmp_path, saving=Saving(), stops=Stops(at_step=2))
    with pytest.raises(ValueError, match="has checkpoints of an earlier run"):
        run(tmp_path, saving=Saving(resume=False))


def test_a_workdir_in_use_is_told(tmp_path):
    def batches():
        for batch in classifier.endless():
            with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on "):
                run(tmp_path)
            yield batch

    def once():  # the first batch is read before the folder is held
        yield from itertools.chain(itertools.islice(classifier.endless(), 1), batches())

    run(tmp_path, once(), steps=2)


@pytest.mark.parametrize(
    "number, raised", [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_saves_and_ends_the_run(number, raised, tmp_path):
    def batches():
        for place, batch in enumerate(classifier.endless()):
            if place == 3:
                os.kill(os.getpid(), number)
            yield batch

    with pytest.raises(raised) as error:
        run(tmp_path, batches(), saving=Saving())
    if raised is Stopped:
        assert (error.value.code, error.value.reason) == (143, "interrupted after step 4 of 8")
    assert steps_in(tmp_path / "checkpoints") == [4]
    assert run(tmp_path, saving=Saving()).losses == run().losses[4:]


@pytest.mark.parametrize("step", [4, 5])
def test_calls_that_do_not_lead_on_from_a_checkpoint_are_told(step, tmp_path):
    run(tmp_path, saving=Saving(), stops=Stops(at_step=step))
    more = {"saving": Saving(), "steps_per_call": 2}
    if step == 4:
        assert run(tmp_path, **more).step == STEPS
        return
    with pytest.raises(ValueError, match="the run goes on from step 5, which calls of 2 steps do"):
        run(tmp_path, **more)


def test_a_signal_while_the_last_state_is_written_waits_for_it(tmp_path, monkeypatch):
    closed = []
    close = Checkpoints.__exit__

    def closing(self, *error):
        os.kill(os.getpid(), signal.SIGTERM)
        closed.append(close(self, *error))

    monkeypatch.setattr(Checkpoints, "__exit__", closing)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("not listened to"))
    try:
        assert run(tmp_path, saving=Saving()).step == STEPS
    finally:
        signal.signal(signal.SIGTERM, before)
    assert closed and steps_in(tmp_path / "checkpoints") == [STEPS]


def test_what_ends_a_run_early_leaves_its_state(tmp_path):
    with pytest.raises(ValueError, match="the data ended after 5 of 8 steps"):
        run(tmp_path / "short", classifier.batches(5), saving=Saving())
    assert steps_in(tmp_path / "short" / "checkpoints") == [5]
    with pytest.raises(ValueError, match="the data ended after 5 of 8 steps"):
        run(tmp_path / "each", classifier.batches(5), saving=Saving(every=1))
    assert steps_in(tmp_path / "each" / "checkpoints") == [3, 4, 5]

    def broken():
        for place, batch in enumerate(classifier.endless()):
            yield batch if place != 3 else {**batch, "image": batch["image"] * np.nan}

    with pytest.raises(ValueError, match="step 4"):
        run(tmp_path / "broken", broken(), saving=Saving())
    assert steps_in(tmp_path / "broken" / "checkpoints") == [4]


def test_metrics_that_cannot_be_written_end_the_run_with_its_state_saved(tmp_path, monkeypatch):
    write = MetricsWriter.write

    def full(self, step, metrics):
        if step == 4:
            raise ValueError("the disk is full")
        write(self, step, metrics)

    monkeypatch.setattr(MetricsWriter, "write", full)
    with pytest.raises(ValueError, match="the disk is full"):
        run(tmp_path, saving=Saving())
    monkeypatch.undo()
    (step,) = steps_in(tmp_path / "checkpoints")
    assert step in (4, 5)
    with pytest.warns(MetricsWarning, match=f"reports up to step {step}, from which"):
        assert run(tmp_path, saving=Saving()).losses == run().losses[step:]


def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(tmp_path):
    held_out = {
        "eval_batches": classifier.batches(2, seed=9),
        "test_batches": classifier.batches(2, seed=10),
    }
    whole = run(tmp_path / "whole", saving=Saving(), **held_out).history[-1]

    def batches():
        for place, batch in enumerate(classifier.endless()):
            if place == STEPS - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with pytest.raises(Stopped):
        run(tmp_path / "cut", batches(), saving=Saving(), **held_out)
    (line,) = run(tmp_path / "cut", saving=Saving(), **held_out).history
    assert line == {name: whole[name] for name in ("step", "eval_loss", "test_loss")}
    assert run(tmp_path / "whole", saving=Saving(), **held_out).history == []


def test_a_step_at_which_a_run_ends_is_evaluated_if_due(tmp_path):
    held_out = {"eval_batches": classifier.batches(2, seed=9), "eval_every": 4}
    stops = Stops(at_step=4)
    assert "eval_loss" in run(tmp_path, saving=Saving(), stops=stops, **held_out).history[-1]


def test_a_run_that_has_reached_its_step_takes_none(tmp_path):
    for _ in range(2):
        result = run(tmp_path, saving=Saving(), stops=Stops(at_step=3))
    assert (result.step, result.losses) == (3, [])


class InBytes:
    """Batches whose position is bytes, as that of grain's DataLoader."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        return next(itertools.islice(classifier.endless(), self.place - 1, None))

    def get_state(self):
        return str(self.place).encode()

    def set_state(self, state):
        self.place = int(state.decode())


def test_positions_may_be_bytes_and_others_are_told_at_once(tmp_path):
    run(tmp_path, InBytes(), saving=Saving(), stops=Stops(at_step=3))
    assert run(tmp_path, InBytes(), saving=Saving()).losses == run().losses[3:]
    batches = InBytes()
    batches.get_state = lambda: {1, 2}
    with pytest.raises(ValueError, match="batches: their state, set, cannot be stored as JSON"):
        run(tmp_path / "other", batches, saving=Saving())
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_time_ends_a_run(tmp_path):
    result = run(tmp_path, saving=Saving(), stops=Stops(after_minutes=0.0))
    assert result.step == 1 and steps_in(tmp_path / "checkpoints") == [1]


@pytest.mark.parametrize(("minutes", "saved"), [(1e-9, [1, 2, 3]), (60, [3]), (None, [3])])
def test_checkpoints_are_saved_by_time(minutes, saved, tmp_path):
    run(tmp_path, steps=3, saving=Saving(minutes=minutes))
    assert steps_in(tmp_path / "checkpoints") == saved


def test_time_counts_from_the_checkpoint_before(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Saving, "overdue", lambda self, seconds: asked.append(seconds))

    def slowly(batches):
        for number, batch in enumerate(batches):
            time.sleep(2 if number == 3 else 0)  # the batch of step 4
            yield batch

    run(tmp_path, slowly(classifier.endless()), steps=5, saving=Saving(every=4))
    assert len(asked) == 5 and asked[3] > 2 and asked[4] < asked[3]


def test_saving_needs_a_folder_and_whole_calls():
    with pytest.raises(ValueError, match="minutes=0 saves after every step: say every=1, or leave"):
        Saving(minutes=0)
    with pytest.raises(ValueError, match="saving needs a workdir"):
        run(saving=Saving())
    with pytest.raises(ValueError, match="local checkpoints need both"):
        run("x", saving=Saving(local="y"))
    with pytest.raises(ValueError, match="do not divide checkpoint_every=3"):
        run("x", saving=Saving(every=3), steps_per_call=2)


def test_processes_of_tensorflow_do_not_save_over_each_other(tmp_path, monkeypatch):
    workers = {"worker": ["localhost:1", "localhost:2"]}
    config = {"cluster": workers, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="the 2 processes of TF_CONFIG cannot save checkpoints"):
        run(tmp_path, saving=Saving(), backend="tf")


KILLED = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
from pathlib import Path
from tests.training import classifier
from tests.training.test_resume import run
from meshdsl.training.checkpointing.saving import Saving
result = run(Path(sys.argv[1]), backend="jax", steps=10_000, saving=Saving(every=2, keep=2))
"""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """Killed 50 times, most of them during a save: there is nearly always one under way."""
    rng, reached = random.Random(0), 0
    whole = None
    for _ in range(50):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
        began = (
            set(steps_in(tmp_path / "checkpoints"))
            if (tmp_path / "checkpoints").exists()
            else set()
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:  # until it saves
            folder = tmp_path / "checkpoints"
            if folder.exists() and set(steps_in(folder)) - began:
                break
            time.sleep(0.05)
        time.sleep(rng.random() * 0.7)
        process.kill()
        process.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error", CheckpointWarning)
            result = run(
                tmp_path,
                backend="jax",
                steps=10_000,
                saving=Saving(every=2, keep=2),
                stops=Stops(at_step=1),
            )
        assert result.step > reached
        reached = result.step
    whole = run(backend="jax", steps=reached + 2)
    final = run(
        tmp_path, backend="jax", steps=10_000, saving=Saving(), stops=Stops(at_step=reached + 2)
    )
    assert final.losses == whole.losses[reached:]
