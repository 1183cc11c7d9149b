"""Copies that a host still holds of a line of training that was abandoned are not gone on from."""

import errno
import shutil

import pytest

from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.checkpointing.copies import host_copies
from meshdsl.training.checkpointing.copies.starts import Starts
from tests.training.checkpointing.test_checkpoints import assert_same, made


class Killed(Exception):
    """Stands for the end of a process."""


@pytest.fixture
def job(tmp_path):
    """Returns what runs a job that copies each of some steps: `ends` as it should, or is killed."""

    def run(state, *steps, ends=False, saves=None, copies=True, restores=True):
        folder = tmp_path / "copies" if copies else None
        try:
            with Checkpoints(tmp_path / "kept", host_copies=folder) as checkpoints:
                found = checkpoints.restore(state) if restores else None
                for step in steps:
                    checkpoints.copy(step, state)
                if saves is not None:
                    checkpoints.save(saves, state)
                    checkpoints.wait()
                if not ends:
                    raise Killed
        except Killed:
            pass
        return found

    return run


def away(folder):
    """Takes a host away with its copies; returns what brings it back."""
    (folder / "copies" / "process.0").rename(folder / "away")
    return lambda: shutil.move(folder / "away", folder / "copies" / "process.7")


@pytest.mark.parametrize("step", [7, 9])
def test_copies_of_an_abandoned_line_do_not_win_over_newer_ones(step, job, tmp_path):
    """Of the same step and of later ones; though a job has ended between as it should."""
    old, new = made(0), made(1)
    for _ in range(3):  # starts
        job(old, step - 1, step)
    back = away(tmp_path)
    job(new, 5, ends=True, saves=5)
    assert not (tmp_path / "copies").exists()
    assert job(new, 6, 7).step == 5
    back()
    found = job(new)
    assert found.step == 7 and found.source
    assert_same(found.state, new)


def test_copies_do_not_win_over_checkpoints_of_a_later_job_without_copies(job, tmp_path):
    old, new = made(0), made(1)
    job(old, 8, 9)
    back = away(tmp_path)
    job(new, saves=5, copies=False)
    back()
    assert_same(job(new).state, new)


def no_space(*given):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_copies_do_not_win_over_checkpoints_of_a_later_start_whose_memory_is_full(
    job, tmp_path, monkeypatch
):
    old, new = made(0), made(1)
    job(old, 8, 9)
    back = away(tmp_path)
    with monkeypatch.context() as full, pytest.warns(UserWarning, match="goes on without copies"):
        full.setattr(host_copies, "save_file", no_space)
        job(new, 4, 5, saves=5)
    assert Starts.read(tmp_path / "kept").begun == [(2, 0)]  # its own number
    back()
    found = job(new)
    assert (found.step, found.source) == (5, "")
    assert_same(found.state, new)


def test_a_save_of_a_start_that_takes_no_step_abandons_nothing(job, tmp_path):
    state = made(0)
    job(state, 6, 7, 8)
    back = away(tmp_path)
    shutil.copytree(tmp_path / "away" / "7", tmp_path / "copies" / "process.0" / "7")
    assert job(state, saves=7).step == 7  # and is killed
    back()
    assert job(state).step == 8


def test_a_start_that_cannot_be_written_down_copies_on_and_says_it_later(tmp_path, monkeypatch):
    kept, state = tmp_path / "kept", made()
    with Checkpoints(kept, host_copies=tmp_path / "copies") as checkpoints:
        said = r"cannot write to .*kept/starts\.json: No space"
        with monkeypatch.context() as full, pytest.warns(UserWarning, match=said) as told:
            full.setattr(Starts, "_write", no_space)
            checkpoints.copy(1, state)
            checkpoints.copy(2, state)
        assert len(told) == 1
        assert Starts.read(kept).begun == []
        checkpoints.copy(3, state)
        assert Starts.read(kept).begun == [(1, 0)]
        assert checkpoints.restore(state).step == 3


def test_a_start_that_takes_no_step_abandons_nothing(job, tmp_path):
    state = made(0)
    job(state, 8, 9, saves=4)
    back = away(tmp_path)
    assert job(state).step == 4  # and is killed
    back()
    assert job(state).step == 9


def test_numbers_grow_and_what_says_less_is_left_out(tmp_path):
    starts = Starts.read(tmp_path)
    assert [starts.begin(), starts.begin(5), starts.begin(2)] == [1, 6, 7]
    for number, step in [(1, 0), (2, 7), (3, 12), (6, 9), (7, 9)]:
        starts.went_on(number, step)
    again = Starts.read(tmp_path)
    assert (again.last, again.begun) == (7, [(1, 0), (2, 7), (7, 9)])
    kept = [(1, 7), (1, 8), (2, 9), (3, 10), (3, 13), (7, 20)]
    assert [again.current(*one) for one in kept] == [True, False, True, False, False, True]
    (tmp_path / "starts.json").write_text('{"last": 3')  # it was cut off
    assert Starts.read(tmp_path).begin(8) == 9
