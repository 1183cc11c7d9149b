"""Supervisors count only steps whose shards are together on the hosts that are there."""

import os
import shutil
from types import SimpleNamespace

import jax
import pytest

from meshdsl.training.checkpointing import blocks
from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.checkpointing.copies.starts import Starts
from meshdsl.training.checkpointing.copies.together import (
    newest_together,
    of_no_use,
    said,
    together,
)
from meshdsl.training.checkpointing.newest import delete_copies
from tests.training.checkpointing.test_checkpoints import LAYOUTS, made, placed

OWN = [[0], [1], [2]]  # each process has shards that no other has
TWICE = [[0, 1], [2, 3]]
EVERY = [[0, 1, 2]]


def host(*processes, needs, steps=(7, 8), start=(1, "a")):
    """Returns what a host says of its copies."""
    rest = {"start": [*start], "has": [*processes], "needs": needs}
    return [{"step": step, "time": float(step), **rest} for step in steps]


def found(folder, *hosts):
    return together(hosts, Starts.read(folder))


@pytest.mark.parametrize(
    ("needs", "there", "whole"),
    [
        (OWN, [0, 1, 2], True),
        (OWN, [0, 1], False),
        (TWICE, [0, 2], True),
        (TWICE, [1, 3], True),
        (TWICE, [0, 1], False),
        (EVERY, [2], True),
    ],
)
def test_a_step_counts_if_each_shard_is_on_a_host_that_is_there(needs, there, whole, tmp_path):
    steps = found(tmp_path, *(host(process, needs=needs) for process in there))
    assert newest_together(steps) == ((8, 8.0) if whole else None)
    lost = of_no_use(steps, 4)
    assert lost is None if whole else lost.step == 8
    assert whole or lost.lacking == ([2] if needs is OWN else [2, 3])


def test_a_last_step_that_only_some_have_copied_is_no_loss(tmp_path):
    hosts = [host(0, needs=OWN[:2]), host(1, needs=OWN[:2], steps=(6, 7))]
    steps = found(tmp_path, *hosts)
    assert newest_together(steps) == (7, 7.0) and of_no_use(steps, 7) is None


def test_shards_of_different_starts_and_of_abandoned_lines_do_not_count(tmp_path):
    hosts = [host(0, needs=OWN[:2]), host(1, needs=OWN[:2], start=(2, "b"))]
    assert newest_together(found(tmp_path, *hosts)) is None
    starts = Starts.read(tmp_path)
    starts.went_on(starts.begin(4), 7)
    assert newest_together(found(tmp_path, host(0, needs=[[0]]))) == (7, 7.0)


class Killed(Exception):
    """Stands for the end of a process."""


def test_a_copy_says_what_the_state_needs(tmp_path):
    with (
        pytest.raises(Killed),
        Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints,
    ):
        checkpoints.copy(3, placed(made(), *LAYOUTS[1]))
        raise Killed
    (one,) = said(tmp_path / "copies")
    assert (one["step"], one["has"], one["needs"]) == (3, [0], [[0]])
    assert said(None) == said(tmp_path / "none") == []


class Device:
    """A device of some process."""

    def __init__(self, process):
        self.process_index = process


def test_what_a_state_needs_is_one_process_of_each_that_have_a_block(monkeypatch):
    monkeypatch.setattr(jax, "Array", SimpleNamespace)
    devices = [Device(number // 2) for number in range(8)]

    def array(width):
        """Split into as many blocks, over and over."""
        places = {d: (slice(n % width, n % width + 1),) for n, d in enumerate(devices)}
        sharding = SimpleNamespace(devices_indices_map=lambda shape: places)
        return SimpleNamespace(shape=(width,), sharding=sharding)

    split = {"w": array(4), "v": array(4), "all": array(1), "each": array(8)}
    needs = blocks.holders_of(split)
    assert needs == [[0], [0, 1, 2, 3], [0, 2], [1], [1, 3], [2], [3]]


def copy_in(folder):
    (folder / "8").mkdir(parents=True)
    (folder / "8" / "about.json").write_text('{"start": [1, "a"]}')


def test_only_folders_of_processes_have_copies(tmp_path):
    for name in ("process.3", "process.3.old", "process.", "process.x"):
        copy_in(tmp_path / name)
    (tmp_path / "process.4").touch()
    (one,) = said(tmp_path)
    assert one["has"] == [3]


def test_copies_that_a_process_deletes_meanwhile_are_none(tmp_path, monkeypatch):
    for name in ("process.1", "process.2"):
        copy_in(tmp_path / name)
    listed = os.scandir, os.listdir

    def deleting(entries):
        def of(path="."):
            if str(path).endswith("process.1"):  # between two looks
                shutil.rmtree(path)
            return entries(path)

        return of

    for name, entries in zip(("scandir", "listdir"), listed, strict=True):
        monkeypatch.setattr(os, name, deleting(entries))
    (one,) = said(tmp_path)
    assert one["has"] == [2]


def test_only_copies_are_deleted_of_a_folder_that_has_something_else(tmp_path):
    for name in ("process.0/3", "process.12", "process.of.others", "other"):
        (tmp_path / "memory" / name).mkdir(parents=True)
    delete_copies(tmp_path / "memory")
    assert {one.name for one in (tmp_path / "memory").iterdir()} == {"process.of.others", "other"}


def test_the_folder_of_copies_is_deleted_with_them(tmp_path):
    (tmp_path / "memory" / "process.0" / "3").mkdir(parents=True)
    delete_copies(tmp_path / "memory")
    delete_copies(tmp_path / "memory")  # as other hosts on this machine may
    assert not (tmp_path / "memory").exists()
