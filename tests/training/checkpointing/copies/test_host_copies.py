"""Copies in memory: bit for bit, complete or absent, of the last step that all have finished."""

import resource
import shutil
import signal
import warnings

import numpy as np
import pytest

import meshdsl as md
from meshdsl.training.checkpointing.checkpoints import Checkpoints, CheckpointWarning
from meshdsl.training.checkpointing.copies import host_copies
from meshdsl.training.checkpointing.copies.starts import Starts
from meshdsl.training.checkpointing.copies.together import newest_together, said, together
from meshdsl.training.health.replicas import ReplicasDiffer
from tests.training.checkpointing.test_checkpoints import (
    LAYOUTS,
    assert_same,
    made,
    placed,
    places_on,
    steps_in,
)


def opened(path):
    return Checkpoints(path / "kept", host_copies=path / "copies")


def copies(path):
    return steps_in(path / "copies" / "process.0")


class Killed(Exception):
    """Stands for the end of a process: what it had in memory stays there."""


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_state_comes_back_from_any_mesh_on_any_other(number, tmp_path):
    state = made()
    with pytest.raises(Killed), opened(tmp_path) as checkpoints:
        checkpoints.copy(7, placed(state, *LAYOUTS[number]), {"at": 5})
        raise Killed
    with opened(tmp_path) as checkpoints:
        for mesh, layout in LAYOUTS[number::2]:
            found = checkpoints.restore(state, places_on(mesh, layout, state))
            assert (found.step, found.position) == (7, {"at": 5})
            assert_same(placed(found.state, mesh, layout), state)


@pytest.mark.parametrize("layout", ["rows:data", ""])
def test_each_copy_is_of_its_own_step_while_steps_donate(layout, tmp_path):
    start = np.arange(2**18, dtype=np.float32).reshape(8, -1)

    def halved(state):
        return {"state": {"w": state["w"] * 0.5 + 1.0}}

    step = md.jit(halved, "data:8", layout, donate="state")
    state, expected = {"w": md.named(start, ["rows", "columns"])}, start
    with opened(tmp_path) as checkpoints:
        for number in range(1, 7):
            state, expected = step(state)["state"], expected * np.float32(0.5) + np.float32(1)
            checkpoints.copy(number, state)
            found = checkpoints.restore({"w": md.spec(state["w"].dims)})
            assert found.step == number
            np.testing.assert_array_equal(found.state["w"], expected)


def test_threads_share_a_copy_in_pieces_that_do_not_divide_it(tmp_path, monkeypatch):
    monkeypatch.setattr(host_copies, "_PIECE", 1000)
    monkeypatch.setattr(host_copies, "cores", lambda: 5)
    sizes = {"small": 1, "one": 250, "more": 251, "many": 123457}
    arrays = np.random.default_rng(0)
    states = [
        {
            name: md.named(arrays.normal(size=size).astype("f4"), ["d"])
            for name, size in sizes.items()
        }
        for _ in range(5)
    ]
    with opened(tmp_path) as checkpoints:
        for number, state in enumerate(states):
            checkpoints.copy(number, state)
            assert_same(checkpoints.restore(state).state, state)


def test_the_last_two_are_kept_and_a_copy_that_is_not_complete_is_none(tmp_path):
    states = [made(seed) for seed in range(6)]
    with pytest.raises(Killed), opened(tmp_path) as checkpoints:
        for number, state in enumerate(states[:5]):
            checkpoints.copy(number, state)
        assert copies(tmp_path) == [3, 4]
        raise Killed
    own = tmp_path / "copies" / "process.0"
    (own / "4").rename(own / "copy.part")  # killed while it copied step 4 over an older one
    with opened(tmp_path) as checkpoints:
        found = checkpoints.restore(states[0])
        assert found.step == 3
        assert_same(found.state, states[3])
        checkpoints.copy(4, states[5])
        assert copies(tmp_path) == [3, 4]
        assert_same(checkpoints.restore(states[0]).state, states[5])


def test_copies_of_steps_that_a_run_did_not_go_on_from_are_gone_with_its_first(tmp_path):
    with pytest.raises(Killed), opened(tmp_path) as checkpoints:
        for step in (8, 9):
            checkpoints.copy(step, made())
        raise Killed
    with opened(tmp_path) as checkpoints:
        checkpoints.copy(3, made())
        assert copies(tmp_path) == [3]


def test_a_later_checkpoint_goes_before_copies_and_a_copy_before_one_of_its_step(tmp_path):
    one, two = made(1), made(2)
    with opened(tmp_path) as checkpoints:
        checkpoints.copy(4, one)
        checkpoints.save(4, two)
        assert_same(checkpoints.restore(one).state, one)
        checkpoints.save(5, two)
        assert checkpoints.restore(one).step == 5


@pytest.mark.parametrize(
    ("error", "stay"), [(None, False), (ReplicasDiffer("differ"), False), (Killed(), True)]
)
def test_copies_stay_only_where_they_are_of_use(error, stay, tmp_path):
    try:
        with opened(tmp_path) as checkpoints:
            checkpoints.copy(1, made())
            if error is not None:
                raise error
    except (ReplicasDiffer, Killed):
        pass
    assert (tmp_path / "copies").exists() is stay


def test_copies_of_another_run_are_told(tmp_path):
    with pytest.raises(Killed), opened(tmp_path) as checkpoints:
        checkpoints.copy(1, made())
        raise Killed
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(ValueError, match="has local checkpoints of another run"), opened(tmp_path):
        pass


def test_a_full_memory_is_told_once_and_the_run_goes_on(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with opened(tmp_path) as checkpoints:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for step in range(3):
                    checkpoints.copy(step, made())
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert copies(tmp_path) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    (one,) = told
    assert issubclass(one.category, UserWarning) and "The run goes on without copies" in str(
        one.message
    )
    assert not issubclass(one.category, CheckpointWarning)


def test_an_error_in_a_thread_ends_the_copies_and_not_the_run(tmp_path, monkeypatch):
    def failing(target, source):
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as checkpoints:
        for step in range(2):  # files that later copies write over
            checkpoints.copy(step, made())
        monkeypatch.setattr(np, "copyto", failing)
        with pytest.warns(UserWarning, match="No space left on device. The run goes on without"):
            checkpoints.copy(2, made())
        assert copies(tmp_path) == [1]
        checkpoints.copy(3, made())  # does nothing
        assert copies(tmp_path) == [1]


def test_the_newest_copy_is_one_that_all_processes_of_the_host_have(tmp_path):
    def newest_copy(folder):
        return newest_together(together([said(folder)], Starts(folder / "starts.json")))

    assert newest_copy(tmp_path / "none") is None
    for process, steps in enumerate([(4, 5), (5, 6)]):
        for step in steps:
            folder = tmp_path / f"process.{process}" / str(step)
            folder.mkdir(parents=True)
            (folder / "about.json").write_text("{}")
    step, when = newest_copy(tmp_path)
    assert step == 5 and when == (tmp_path / "process.1" / "5" / "about.json").stat().st_mtime
