"""A run that is told to end says whether it is saved before it is killed; schedulers' signals."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import meshdsl as md
from meshdsl.training.checkpointing import speed
from meshdsl.training.checkpointing.grace import Grace
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.checkpointing.speed import own_bytes, seconds_to_save
from meshdsl.training.exit_codes import UNFINISHED
from meshdsl.training.stopping import Stopped, Stopping, Stops
from tests.training import classifier
from tests.training.checkpointing.test_checkpoints import steps_in
from tests.training.test_resume import run

TWICE = """
import os, signal, time
from meshdsl.training.stopping import Stopping, Stops

stopping = Stopping(Stops())
with stopping.listening():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    print(stopping.signalled, flush=True)
    while True:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
"""

ANEW = """
import os, signal, time
from meshdsl.training.stopping import Stopping, Stops

for wait in (0.0, 1.5):  # the second run is there when the first would let the signal end all
    stopping = Stopping(Stops())
    with stopping.listening():
        time.sleep(wait)
        os.kill(os.getpid(), signal.SIGTERM)
        print(stopping.signalled, flush=True)
"""


def signalled(number, at=3):
    """Returns batches, during one of which this process gets a signal, twice."""
    for place, batch in enumerate(classifier.endless()):
        if place == at:
            os.kill(os.getpid(), number)
            if number == signal.SIGUSR1:
                os.kill(os.getpid(), number)
        yield batch


def grace(seconds, workdir):
    said = []
    return Grace(seconds, workdir, said.append), said


@pytest.mark.parametrize(
    ("number", "code", "ended"),
    [(signal.SIGTERM, 143, "interrupted"), (signal.SIGUSR1, UNFINISHED, "ended by a notice")],
)
def test_the_signals_of_schedulers_end_a_run_that_is_saved_within_the_grace(
    number, code, ended, tmp_path, capfd
):
    """Slurm's --signal=USR1@60, or SIGTERM of Slurm, GKE and Cloud TPU."""
    more = {"saving": Saving(), "stops": Stops(grace=60)}
    with pytest.raises(Stopped) as error:
        run(tmp_path, signalled(number), **more)
    assert (error.value.code, error.value.reason) == (code, f"{ended} after step 4 of 8")
    assert steps_in(tmp_path / "checkpoints") == [4]
    told = capfd.readouterr().err
    assert "saving step 4 takes about " in told and " are left of --grace=60" in told
    assert "killed" not in told
    assert run(tmp_path, **more).losses == run().losses[4:]


def test_a_run_without_time_enough_says_so_and_from_where_it_goes_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(speed, "_speed", lambda folder: 1.0)  # bytes per second
    with pytest.raises(Stopped):
        run(tmp_path, signalled(signal.SIGTERM, 5), saving=Saving(), stops=Stops(grace=30))
    told = capfd.readouterr().err
    assert " are left of --grace=30: it is tried, but may be cut off. If it is killed, a" in told
    assert told.rstrip().endswith("a restart begins anew: there is no checkpoint")
    assert steps_in(tmp_path / "checkpoints") == [6]


def test_the_last_checkpoint_says_how_long_the_next_one_takes(tmp_path):
    state = {"w": md.named(np.zeros((4, 6), "f4"), ["a", "b"])}
    assert seconds_to_save(7.5, state, tmp_path) == 7.5
    assert own_bytes(state) == 96
    assert 0 < seconds_to_save(None, state, tmp_path) < 96
    assert [*tmp_path.iterdir()] == []
    assert seconds_to_save(None, state, tmp_path / "nowhere") == 0


def test_each_shard_counts_once_however_many_devices_hold_it():
    made = md.jit(lambda key: {"state": classifier.init(key)}, *classifier.LAYOUTS[1])
    state = made(md.random.key(0))["state"]
    assert own_bytes({"w": state.w_in, "bias": state.bias}) == 4 * (12 * 8 + 8)


def test_when_the_grace_is_about_to_end_what_is_lost_is_said(tmp_path):
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    (tmp_path / "checkpoints" / "60.orbax-checkpoint-tmp").mkdir()
    for step, what in ((None, ", the step at hand has not ended"), (60, ", step 60: it is not")):
        one, said = grace(0.01, tmp_path)
        one.begin()
        if step is not None:
            one.saving(step, lambda: 0.0)
            said.clear()
        one._timer.join()
        (line,) = said
        assert line.startswith(f"--grace=0.01 is about to end{what}"), line
        assert line.endswith("If it is killed, a restart goes on from step 40")


def test_nothing_is_said_without_a_signal_or_after_all_is_saved(tmp_path):
    one, said = grace(0.2, tmp_path)
    one.saving(4, lambda: pytest.fail("asked for"))
    one.end()
    one.begin()
    one.end()
    one._timer.join()
    unknown, more = grace(None, tmp_path)
    unknown.begin()
    unknown.saving(4, lambda: pytest.fail("asked for"))
    assert said == more == []


def test_a_grace_without_anything_to_save_in_is_told():
    with pytest.raises(ValueError, match="grace is the time to save in, which needs `saving`"):
        run(stops=Stops(grace=30))


def test_sigterm_of_two_senders_is_one_signal_and_a_later_one_ends_the_process():
    """Slurm sends it to a supervisor and to its processes, to whom the supervisor sends it too."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("True\n", -signal.SIGTERM), done.stderr


def test_a_run_that_has_ended_leaves_the_signals_of_the_next_one_alone():
    done = subprocess.run(
        [sys.executable, "-c", ANEW], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("True\nTrue\n", 0), done.stderr


def test_a_listener_of_someone_else_keeps_its_signal():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    stopping = Stopping(Stops())
    try:
        with stopping.listening():
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [1] and not stopping.signalled
