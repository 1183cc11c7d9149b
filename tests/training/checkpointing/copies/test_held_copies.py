"""Copies in the memory of hosts that are left: other processes, on other meshes, go on from them.

Each "host" is a process with a folder of its own.
"""

import json
import shutil
import socket
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshdsl.training.checkpointing.checkpoints import Checkpoints, CheckpointWarning
from meshdsl.training.checkpointing.copies import block_server
from meshdsl.training.checkpointing.copies.block_server import BlockClient, BlockServer, Unreachable
from meshdsl.training.checkpointing.copies.held_copies import Holder, host_of
from meshdsl.training.checkpointing.copies.held_parts import HeldParts
from tests.training.checkpointing.test_checkpoints import (
    LAYOUTS,
    assert_same,
    made,
    placed,
    places_on,
    steps_in,
)
from tests.training.test_resume import run
from tests.training.test_saving_in_processes import begun, killed, losses, start, together

__all__ = ["start", "together"]  # fixtures
COPIED = {"mesh": "data:2", "layout": "batch:data"}
SHARDS = "params/hidden:data; optimizer/hidden:data"
TWICE = {"mesh": "replica:2,data:2", "layout": f"batch:replica+data; {SHARDS}"}
HALF = {"mesh": "data:2", "layout": f"batch:data; {SHARDS}"}


def hosts(folder, *numbers, every=4):
    """Returns the options of processes on some hosts."""
    return {
        index: {"saving": {"every": every, "host_copies": str(folder / f"host{number}")}}
        for index, number in enumerate(numbers)
    }


def held(folder):
    """Returns the last step that a host has copies of."""
    return max(max(steps_in(process)) for process in folder.glob("process.*"))


@pytest.mark.slow
def test_one_host_goes_on_alone_and_two_new_ones_join_it(together, tmp_path):
    """Where each has all of the state, a lost one costs no step that another has copied."""
    work, whole = tmp_path / "work", run(steps=12).losses
    job = {"workdir": str(work), "steps": 12}
    own = hosts(tmp_path, 0, 1)
    assert [out for out, _ in together(2, {**job, **COPIED, **killed(work, 7, 4)}, own=own)] == [
        [],
        [],
    ]
    one = held(tmp_path / "host1")
    assert one in (6, 7)
    alone = {**job, "mesh": "data:1", "layout": "", **killed(work, 10, 8)}
    ((out, errors),) = together(1, alone, own=hosts(tmp_path, 1))
    assert out == [] and "not used" not in errors
    assert begun(work) == [0, one] and held(tmp_path / "host1") == 10
    assert not (tmp_path / "host1" / "process.1").exists()  # it has another number now
    last = {**job, "mesh": "data:4", "layout": "batch:data"}
    found = together(4, last, own=hosts(tmp_path, 5, 0, 1, 6))  # host 0 has old ones of step 7
    assert [out[0]["step"] for out, _ in found] == [12] * 4, found
    assert begun(work) == [0, one, 10]
    np.testing.assert_allclose([*losses(work).values()], whole, rtol=2e-5)
    assert not any((tmp_path / f"host{n}").exists() for n in (0, 1, 5, 6))


@pytest.mark.long
def test_replicas_on_the_hosts_that_are_left_make_the_state(together, tmp_path):
    """Each takes the place of the other, so that all blocks go over the network."""
    work, whole = tmp_path / "work", run(steps=12).losses
    job = {"workdir": str(work), "steps": 12}
    own = hosts(tmp_path, 0, 1, 2, 3)
    first = together(4, {**job, **TWICE, **killed(work, 7, 4)}, own=own)
    assert [out for out, _ in first] == [[]] * 4, first
    common = min(held(tmp_path / f"host{n}") for n in (0, 3))
    (out, errors), (other, _) = together(2, {**job, **HALF}, own=hosts(tmp_path, 3, 0))
    assert out == other and out[0]["step"] == 12, errors
    assert begun(work)[1] in (common, common - 1) and "not used" not in errors
    np.testing.assert_allclose([*losses(work).values()], whole, rtol=2e-5)


@pytest.mark.long
def test_what_only_a_lost_host_had_is_read_from_the_checkpoint(together, tmp_path):
    work, whole = tmp_path / "work", run(steps=12).losses
    job = {"workdir": str(work), "steps": 12}
    first = together(2, {**job, **HALF, **killed(work, 7, 4)}, own=hosts(tmp_path, 0, 1))
    assert [out for out, _ in first] == [[], []]
    alone = {**job, "mesh": "data:1", "layout": ""}
    (((out,), errors),) = together(1, alone, own=hosts(tmp_path, 1))
    assert out["step"] == 12 and begun(work) == [0, 4]
    assert errors.count("are not used: no host that is left has all blocks of ") == 1
    np.testing.assert_allclose([*losses(work).values()], whole, rtol=2e-5)


class Killed(Exception):
    """Stands for the end of a process."""


def divided(copy, parts):
    """Divides a copy among the folders of some processes, each with the blocks of some arrays."""
    about = json.loads((copy / "about.json").read_text())
    blocks = load_file(copy / "state.safetensors")
    names = [*blocks]
    for number in range(parts):
        folder = copy.parent.parent / f"process.{number + 10}" / copy.name
        folder.mkdir(parents=True)
        own = {}  # the paths of its blocks, which have new numbers
        regions = {}
        for name in names[number::parts]:
            path, _, at = name.rpartition("#")
            regions.setdefault(path, []).append(about["blocks"][path][int(at)])
            own[f"{path}#{len(regions[path]) - 1}"] = blocks[name]
        save_file(own, folder / "state.safetensors")
        (folder / "about.json").write_text(json.dumps({**about, "blocks": regions}))
    shutil.rmtree(copy.parent)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("number", range(1, len(LAYOUTS)))
def test_the_copies_of_several_processes_make_the_state_if_none_lacks(number, lost, tmp_path):
    state = made()
    with (
        pytest.raises(Killed),
        Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints,
    ):
        checkpoints.save(4, state, {"at": 4})
        checkpoints.copy(7, placed(state, *LAYOUTS[number]), {"at": 7})
        raise Killed
    divided(tmp_path / "copies" / "process.0" / "7", 3)
    if lost:
        shutil.rmtree(tmp_path / "copies" / "process.11")
    with Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints:
        mesh, layout = LAYOUTS[-number]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = checkpoints.restore(state, places_on(mesh, layout, state))
        assert (found.step, found.position) == ((4, {"at": 4}) if lost else (7, {"at": 7}))
        assert_same(placed(found.state, mesh, layout), state)
        said = [str(one.message) for one in told]
        assert len(said) == lost and all("no host that is left has all blo" in o for o in said)
        assert (tmp_path / "copies" / "process.12" / "7").exists() is not lost
        for step in (8, 9):
            checkpoints.copy(step, state)
        assert [path.name for path in (tmp_path / "copies").iterdir()] == ["process.0"]


def test_a_run_starts_anew_if_its_copies_lack_something_and_it_has_no_checkpoint(tmp_path):
    state = made()
    with (
        pytest.raises(Killed),
        Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints,
    ):
        checkpoints.copy(7, placed(state, *LAYOUTS[1]))
        raise Killed
    divided(tmp_path / "copies" / "process.0" / "7", 3)
    shutil.rmtree(tmp_path / "copies" / "process.11")
    with (
        Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints,
        pytest.warns(CheckpointWarning, match="no host that is left has all blo"),
    ):
        assert checkpoints.restore(state, places_on(*LAYOUTS[1], state)) is None


def test_copies_of_different_starts_are_not_mixed(tmp_path):
    """A later start has taken the same step again, on another mesh."""
    state = made()
    for step in (3, 3):
        with (
            pytest.raises(Killed),
            Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints,
        ):
            checkpoints.copy(step, state)
            raise Killed
        copies = tmp_path / "copies"
        if not (copies / "process.7").exists():
            (copies / "process.0").rename(copies / "process.7")
    other = made(1)
    with Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints:
        checkpoints.copy(3, other)
        assert_same(checkpoints.restore(state, places_on(*LAYOUTS[1], state)).state, other)
        assert not (tmp_path / "copies" / "process.7" / "3").exists()


def test_blocks_are_sent_to_those_who_know_the_secret_and_nothing_else_is(tmp_path):
    state = made()
    with (
        pytest.raises(Killed),
        Checkpoints(tmp_path / "kept", host_copies=tmp_path / "copies") as checkpoints,
    ):
        checkpoints.copy(3, state)
        raise Killed
    asked = {"folder": "process.0", "step": 3, "name": "none#0", "within": None}
    blocks = load_file(tmp_path / "copies" / "process.0" / "3" / "state.safetensors")
    with BlockServer(tmp_path / "copies", "secret") as server:
        addresses = {0: (["localhost"], server.port), 1: (["localhost"], 1)}
        with BlockClient(addresses, "secret") as client:
            for name, block in blocks.items():
                got = client.part(0, {**asked, "name": name}, block.shape, block.dtype)
                np.testing.assert_array_equal(got, block)
                within = [[size // 2, size] for size in block.shape]
                part = block[tuple(slice(*each) for each in within)]
                cut = {**asked, "name": name, "within": within}
                got = client.part(0, cut, part.shape, block.dtype)
                np.testing.assert_array_equal(got, part)
            for changed in ({}, {"folder": "../copies/process.0"}, {"step": 4}):
                with pytest.raises(Unreachable, match="process 0 on localhost does not send "):
                    client.part(0, {**asked, **changed}, [], np.dtype("f4"))
            with pytest.raises(Unreachable, match="process 1 on localhost does not send them"):
                client.part(1, asked, [], np.dtype("f4"))
        with socket.create_connection(("localhost", server.port), 10) as other:
            other.sendall(b"guess\n" + b'{"folder": "process.0"}\n')
            assert other.recv(10) == b""


def test_a_host_may_ask_again_later_and_get_much(tmp_path, monkeypatch):
    monkeypatch.setattr(block_server, "_PATIENCE", 0.5)
    monkeypatch.setattr(block_server, "_PIECE", 1000)
    block = np.arange(2**20, dtype="f4")
    folder = tmp_path / "process.0" / "3"
    folder.mkdir(parents=True)
    save_file({"w#0": block}, folder / "state.safetensors")
    asked = {"folder": "process.0", "step": 3, "name": "w#0", "within": None}
    with (
        BlockServer(tmp_path, "secret") as server,
        BlockClient({0: (["localhost"], server.port)}, "secret") as client,
    ):
        for pause in (0.0, 1.0):  # it has read from other hosts meanwhile
            time.sleep(pause)
            got = client.part(0, asked, block.shape, block.dtype)
            np.testing.assert_array_equal(got, block)


def test_where_one_holder_does_not_send_its_block_another_does(tmp_path):
    block, region = np.arange(6, dtype="f4"), ((0, 6),)
    folder = tmp_path / "process.0" / "3"
    folder.mkdir(parents=True)
    save_file({"w#0": block}, folder / "state.safetensors")
    holders = [Holder(number, "process.0", 0) for number in (0, 1, 2)]  # 1 and 2 are away
    blocks = SimpleNamespace(
        holders={"w": {region: holders}}, about={"arrays": {"w": {"dtype": "float32"}}}
    )
    version = SimpleNamespace(step=3)
    with BlockServer(tmp_path, "secret") as server:
        addresses = {0: (["localhost"], server.port), 1: (["localhost"], 1), 2: (["localhost"], 1)}
        client = BlockClient(addresses, "secret")
        with client, HeldParts(tmp_path / "none", version, blocks, 9, client) as parts:
            for _ in range(3):  # each is the first that is asked
                np.testing.assert_array_equal(parts("w", 0, None), block)
        del addresses[0], holders[0]
        client = BlockClient(addresses, "secret")
        with (
            client,
            HeldParts(tmp_path / "none", version, blocks, 9, client) as parts,
            pytest.raises(Unreachable, match="does not send them"),
        ):
            parts("w", 0, None)


def test_a_folder_on_one_host_is_one_and_another_is_another(tmp_path):
    (tmp_path / "other").mkdir()
    assert host_of(tmp_path) == host_of(tmp_path / "other" / "..")
    assert host_of(tmp_path) != host_of(tmp_path / "other")
