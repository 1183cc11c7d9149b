"""Local checkpoints: bit for bit, onto any mesh that has its blocks; what is wrong is told."""

import resource
import shutil
import signal
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.training.checkpointing import local_checkpoints
from meshdsl.training.checkpointing.checkpoints import Checkpoints, CheckpointWarning
from tests.training.checkpointing.test_checkpoints import (
    LAYOUTS,
    assert_same,
    cut,
    flip,
    made,
    placed,
    places_on,
    steps_in,
)


def opened(path):
    return Checkpoints(path / "kept", local=path / "local")


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_state_goes_from_any_mesh_to_any_other(number, tmp_path):
    state = made()
    with opened(tmp_path) as checkpoints:
        checkpoints.save(7, placed(state, *LAYOUTS[number]), {"at": 5}, local=True)
        for mesh, layout in LAYOUTS[number::2]:
            found = checkpoints.restore(state, places_on(mesh, layout, state))
            assert (found.step, found.position) == (7, {"at": 5})
            assert_same(placed(found.state, mesh, layout), state)
        assert_same(checkpoints.restore(state).state, state)


def test_what_is_saved_is_not_what_comes_after(tmp_path):
    """Arrays that are written over, or given to a donating step, while they are being saved."""
    state = made()
    array = state.params["w"].data
    array.flags.writeable = True  # `md.named` keeps a copy that nobody writes by accident
    before = array.copy()
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, local=True)
        array[...] = 0
        assert np.array_equal(checkpoints.restore(state).state.params["w"], before)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("layout", ["rows:data", ""])
def test_a_donating_step_does_not_change_what_is_being_saved(local, layout, tmp_path):
    start = np.arange(2**21, dtype=np.float32).reshape(8, -1)

    def halved(state):
        return {"state": {"w": state["w"] * 0.5 + 1.0}}

    step = md.jit(halved, "data:8", layout, donate="state")
    state = step({"w": md.named(start, ["rows", "columns"])})["state"]
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, local=local)
        for _ in range(5):
            state = step(state)["state"]
        found = checkpoints.restore({"w": md.spec(state["w"].dims)})
    assert np.array_equal(found.state["w"], start * 0.5 + 1.0)


def part(path, step):
    return path / "local" / "process.0" / str(step)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda p: flip(p / "state.safetensors"), "state.safetensors is not as it was written"),
        (lambda p: cut(p / "state.safetensors"), "state.safetensors is not as it was written"),
        (lambda p: (p / "state.safetensors").unlink(), "state.safetensors cannot be read"),
        (lambda p: cut(p / "about.json"), "its description cannot be read"),
        (lambda p: cut(p / "seal.0.json"), "seal.0.json cannot be read"),
    ],
)
def test_a_damaged_one_is_told_and_the_one_before_it_is_taken(harm, told, tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, made(1))
        checkpoints.save(2, made(2), local=True)
    harm(part(tmp_path, 2))
    with opened(tmp_path) as checkpoints:
        with pytest.warns(
            CheckpointWarning, match=rf"2 is damaged: {told}.*; kept as .*damaged\.2"
        ):
            assert_same(checkpoints.restore(made()).state, made(1))
        checkpoints.save(2, made(2), local=True)
    with opened(tmp_path) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(checkpoints.restore(made()).state, made(2))


def test_what_a_run_has_not_gone_on_from_is_saved_again(tmp_path):
    with opened(tmp_path) as checkpoints:
        for step in (5, 6):
            checkpoints.save(step, made(step), local=True)
        checkpoints.save(5, made(7), local=True)
    assert steps_in(tmp_path / "local" / "process.0") == [5]
    with opened(tmp_path) as checkpoints:
        assert_same(checkpoints.restore(made()).state, made(7))


def test_those_of_another_run_are_not_taken_up(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(9, made(), local=True)
    (part(tmp_path, 9).parent / "8.part").mkdir()  # of a process that was killed
    shutil.copytree(tmp_path, tmp_path / "moved")
    with opened(tmp_path / "moved") as checkpoints:
        assert checkpoints.restore(made()).step == 9
    assert not (part(tmp_path / "moved", 9).parent / "8.part").exists()
    with pytest.raises(ValueError, match=r"process.0 has local checkpoints of another run; choose"):
        Checkpoints(tmp_path / "other", local=tmp_path / "local")
    with pytest.raises(
        ValueError, match=r"cannot keep checkpoints in .*process.0: Not a directory"
    ):
        Checkpoints(tmp_path / "kept", local=tmp_path / "kept" / "run.id")


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path):
    """A limit on the size of files, as a full disk: what does not fit is an error of the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, made(1), local=True)
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
            checkpoints.save(2, made(2), local=True)
            with pytest.raises(ValueError, match=r"cannot save a checkpoint in .*process.0: "):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert checkpoints.restore(made()).step == 1
    assert sorted(path.name for path in part(tmp_path, 1).parent.iterdir()) == ["1"]


def test_parts_of_several_starts_are_no_checkpoint(monkeypatch, tmp_path):
    """A host was away, and has a step of another line of training than the others."""

    def told(folders, ask):  # two processes, one after the other
        texts = []
        monkeypatch.setattr(
            local_checkpoints, "gathered", lambda text: texts.append(text) or [text]
        )
        for folder in folders:
            ask(folder)
        monkeypatch.setattr(local_checkpoints, "gathered", lambda text: texts)
        return ask(folders[0])

    folders = [local_checkpoints.LocalFolder(tmp_path / str(n), "run") for n in range(2)]
    folders[1]._start_id = folders[0]._start_id
    for step, starts in ((100, None), (150, ["one", "other"])):
        for number, folder in enumerate(folders):
            folder._start_id = folder._start_id if starts is None else starts[number]
            folder._keep = 2
            folder.save(step, {"w": jnp.ones(2)}, {"arrays": {}, "position": None, "config": {}})
            folder.wait()
    assert told(folders, lambda folder: folder.steps()) == [100]
    message = told(folders, lambda folder: folder.lacking(100))
    assert "step 150 is not used: its parts are of several starts of the run" in message
    assert told(folders, lambda folder: folder.lacking(150)) is None
