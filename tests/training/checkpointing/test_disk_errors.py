"""A full disk and a clock that jumps are one line of ours each, without Orbax's tracebacks."""

import asyncio
import errno
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.training.checkpointing import disk_errors
from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.checkpointing.disk_errors import Writing
from tests.training.reporting.test_metrics import room

STATE = {"w": md.named(np.arange(4096.0, dtype="f4"), ["x"])}


@pytest.mark.parametrize("arrays", [1, 12])
def test_a_full_disk_is_one_line_and_no_log(arrays, tmp_path, caplog, capfd):
    state = {f"w{n}": STATE["w"] for n in range(arrays)}
    with Checkpoints(tmp_path / "kept") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with room(2000), pytest.raises(ValueError, match=r"File too large. Those before it are"):
            checkpoints.save(2, state)
            checkpoints.wait()
        assert checkpoints.restore(state).step == 1
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capfd.readouterr().err == ""


def test_only_writes_that_follow_a_failed_one_are_not_printed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with Checkpoints(tmp_path / "kept"):
        pass
    loop = asyncio.new_event_loop()
    loop.close()

    def raised(function, thing=None):
        try:
            function()
        except RuntimeError as error:
            trace = error.__traceback__.tb_next
            failure = SimpleNamespace(exc_value=error, exc_traceback=trace, object=thing)
            sys.unraisablehook(failure)

    def of_the_user():
        loop.call_soon_threadsafe(print)

    raised(lambda: (_ for _ in ()).throw(RuntimeError("another")))
    raised(of_the_user)
    raised(lambda: loop.call_soon_threadsafe(print), thing="a destructor")
    assert len(seen) == 3
    late = SimpleNamespace(object=None, exc_value=None, exc_traceback=None)
    try:
        loop.call_soon_threadsafe(print)
    except RuntimeError as error:
        late.exc_value, late.exc_traceback = error, error.__traceback__.tb_next
    sys.unraisablehook(late)
    assert len(seen) == 3


def threads_of_orbax():
    return [t for t in threading.enumerate() if type(t).__module__.startswith("orbax.")]


def test_a_clock_that_jumps_is_explained(tmp_path, caplog, monkeypatch):
    gc.collect()  # what tests before have left is told when it is collected
    caplog.clear()
    with Checkpoints(tmp_path / "kept") as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.wait()
        clock, jumps, running = time.time, [], []

        def jumping():
            if threading.current_thread().name == "async_save":  # of Orbax, which waits for writes
                jumps.append(2000)
                running.extend(threads_of_orbax())
            return clock() + sum(jumps)

        monkeypatch.setattr(time, "time", jumping)
        with pytest.raises(ValueError, match=r"clock of this machine jumped forward by [0-9,]+ s"):
            checkpoints.save(2, STATE)
            checkpoints.wait()
        monkeypatch.undo()
        assert running and not any(thread.is_alive() for thread in running)
        assert checkpoints.restore(STATE).step == 1
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.long
def test_a_clock_that_jumps_is_explained_by_the_last_line_of_a_process(tmp_path):
    line = [
        sys.executable,
        "-m",
        "tests.training.checkpointing.jumping_job",
        str(tmp_path / "kept"),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "jumped forward by 100,000 s" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr
    with Checkpoints(tmp_path / "kept") as checkpoints:
        assert checkpoints.restore(STATE).step == 1


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_threads_of_a_failed_save_are_waited_for_but_not_forever(patience, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_errors, "_LEFT", patience)
    thread_of_orbax = type("Writer", (threading.Thread,), {"__module__": "orbax.checkpoint.write"})
    go_on = threading.Event()
    late = threading.Timer(0.1, go_on.set)
    left = thread_of_orbax(target=lambda: go_on.wait(60))
    left.start()
    with pytest.raises(ValueError, match="as long as Orbax waits"), Writing(tmp_path).reported():
        if patience:
            late.start()
        raise TimeoutError("Timed out after 1200 seconds.")
    assert left.is_alive() == (not patience)
    go_on.set()
    left.join()


def test_a_disk_that_is_too_slow_is_not_blamed_on_the_clock(tmp_path):
    reason = "as long as Orbax waits: the disk or another process"
    with pytest.raises(ValueError, match=reason), Writing(tmp_path).reported():
        raise TimeoutError("Timed out after 1200 seconds.")


def test_what_has_another_cause_stays_as_it_is(tmp_path):
    with pytest.raises(KeyError), Writing(tmp_path).reported():
        raise KeyError("of Orbax")


def logged(name, error, file):
    """Logs an error that is raised in a file, from there."""
    space = {"log": logging.getLogger(name), "error": error}
    code = (
        "try:\n    raise error.with_traceback(None)\nexcept Exception:\n    log.exception('logged')"
    )
    exec(compile(code, file, "exec"), space)


def test_only_logs_of_orbaxs_own_failures_are_dropped_and_only_while_a_folder_is_open(
    tmp_path, caplog
):
    import orbax.checkpoint as ocp

    own = os.path.join(ocp.__path__[0], "some_handler.py")
    full, gone = (OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.ENOENT))
    slow = TimeoutError("Timed out after 1200 seconds.")
    before = {name: list(logging.getLogger(name).filters) for name in ("absl", "asyncio")}
    with Checkpoints(tmp_path / "kept"):
        for name in before:
            logged(name, full, own)
            logged(name, slow, own)
        assert not caplog.records
        for name in before:
            for error, file in (
                (gone, own),
                (KeyError("x"), own),
                (full, "/home/orbax/mine.py"),
                (slow, str(tmp_path / "mine.py")),
            ):
                logged(name, error, file)
                assert len(caplog.records) == 1, (name, error, file)
                caplog.clear()
    assert before == {name: logging.getLogger(name).filters for name in before}
    logged("absl", full, own)
    assert len(caplog.records) == 1


def test_a_failure_that_closes_the_folder_leaves_no_logs(tmp_path, caplog):
    folder = Checkpoints(tmp_path / "kept")
    reason = "File too large"
    with room(2000), pytest.raises(ValueError, match=reason) as failure, folder as checkpoints:
        checkpoints.save(1, STATE)
        checkpoints.wait()
    del failure
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
