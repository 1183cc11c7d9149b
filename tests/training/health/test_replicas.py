"""Replicas of a state that differ by one bit are found and named; equal ones never are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.cli import main
from meshdsl.optim import AdamW
from meshdsl.training import Recipe
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.exit_codes import DIFFERING
from meshdsl.training.health.replicas import (
    WITHOUT_REPLICAS,
    ReplicaCheck,
    ReplicasDiffer,
)
from meshdsl.training.programs import Programs
from meshdsl.training.state import by_path, tree_like
from tests.training import classifier
from tests.training.checkpointing.test_checkpoints import steps_in
from tests.training.test_resume import run

A, B = md.dims(a=8, b=6)


def placed(value, dims, spec, mesh="x:2,y:4", cuts=()):
    """Returns an array on a mesh of 8 devices."""
    sizes = [int(axis.split(":")[1]) for axis in mesh.split(",")]
    names = [axis.split(":")[0] for axis in mesh.split(",")]
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    sharding = NamedSharding(jax.sharding.Mesh(devices, names), PartitionSpec(*spec))
    return md.NamedArray(jax.device_put(value, sharding), md.Shape(dims), cuts)


def flipped(array, device, bit=0, at=0):
    """Returns an array with one bit of an element of one device's shard flipped."""
    parts = []
    for shard in array.data.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == device:
            part.reshape(-1)[at : at + 1].view(np.uint8)[bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(part, shard.device))
    data = jax.make_array_from_single_device_arrays(array.data.shape, array.data.sharding, parts)
    return md.NamedArray(data, array.dims, array.cuts)


def reported(state, step=7, passed=None):
    with pytest.raises(ReplicasDiffer) as error:
        ReplicaCheck(1, passed).check(step, state)
    return str(error.value).splitlines()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "complex64"])
def test_every_bit_of_every_element_counts(dtype):
    x = np.random.default_rng(0).integers(0, 2, (8, 6)).astype(jnp.dtype(dtype))
    state = {"w": placed(x, [A, B], ["x"])}
    check = ReplicaCheck(1)
    check.check(0, state)
    width = 8 * x.itemsize
    for at in (0, 5, 23):
        for bit in range(0, 1 if dtype == "bool" else width, 5):
            other = {"w": flipped(state["w"], 3, bit, at)}
            with pytest.raises(ReplicasDiffer, match="device 3 of process 0 differs"):
                check.check(1, other)


def test_the_one_of_several_that_differs_is_named_with_its_tensors():
    w, v = (placed(np.ones((8, 6), np.float32), [A, B], ["x"]) for _ in range(2))
    state = {"v": flipped(v, 6), "w": flipped(w, 6), "z": w}
    first, *lines = reported(state, passed=5)
    assert "after step 7; they were equal after step 5" in first
    assert lines == [
        "  device 6 of process 0 differs from most others that hold the same: v, w",
    ]


def test_of_two_holders_both_are_named():
    w = placed(np.ones((8, 6), np.float32), [A, B], ["y"])
    first, line = reported({"w": flipped(w, 5)})
    assert "they were equal" not in first
    assert line.startswith(
        "  device 1 of process 0, device 5 of process 0 hold the same and differ"
    )
    assert line.endswith(": w")


def test_elements_that_change_places_are_found():
    x = np.zeros((8, 6), np.float32)
    x[0, 0], x[0, 1] = 1, 2
    w = placed(x, [A, B], ["x"])
    bits = np.float32([1, 2]).view(np.uint32)
    swapped = w
    for at in (0, 1):
        for bit in range(32):
            if (bits[0] ^ bits[1]) >> bit & 1:
                swapped = flipped(swapped, 2, bit, at)
    assert "device 2 " in reported({"w": swapped})[1]


def test_zeros_of_both_signs_and_payloads_of_nan_are_bits():
    payloads = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000], np.uint32)
    x = np.resize(payloads, (8, 6)).view(np.float32)
    w = placed(x, [A, B], ["x"])
    ReplicaCheck(1).check(0, {"w": w})
    assert "device 1 " in reported({"w": flipped(w, 1, 0, 0)})[1]  # another payload
    assert "device 1 " in reported({"w": flipped(w, 1, 31, 3)})[1]  # the sign of a zero


def test_pads_are_not_compared():
    (five,) = md.dims(a=5)
    w = placed(np.ones((8, 6), np.float32), [five, B], ["y"], cuts=((4,), ()))
    for device, at in ((3, 0), (2, 6), (7, 11)):  # 5 rows on 4 devices: 01 23 4- --
        ReplicaCheck(1).check(0, {"w": flipped(w, device, 3, at)})
    assert "device 2 of process 0, device 6" in reported({"w": flipped(w, 2, 3, 5)})[1]


def test_a_device_that_has_no_copy_of_a_shard_is_not_compared():
    w = placed(np.arange(48, dtype=np.float32).reshape(8, 6), [A, B], [("x", "y")])
    ReplicaCheck(1).check(0, {"w": flipped(w, 3)})


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "jax_auto"])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [*classifier.LAYOUTS[1:], ("data:5", "batch:data; params/pixel:data")],
)
def test_steps_of_layouts_leave_equal_replicas(backend, mesh, layout):
    recipe = Recipe(classifier.init, classifier.loss, AdamW(0.05), clip_norm=0.1)
    state = md.jit(recipe.create_state(), mesh, layout, backend)(md.random.key(0))
    step, check = md.jit(recipe.train_step(), mesh, layout, backend), ReplicaCheck(1)
    for number, batch in enumerate(classifier.batches(3)):
        state, _ = step(state, classifier.named(batch))
        check.check(number, state)
    assert check.passed == 2


def faulty(monkeypatch, at, device, path="params/w_out"):
    """Makes a device flip a bit of the state after a step."""
    compiled, calls = Programs.compiled, []

    def with_fault(self, which):
        program = compiled(self, which)

        def step(state, batch):
            result, metrics = program(state, batch)
            calls.append(which)
            if len(calls) == at:
                leaves = by_path(result)
                leaves[path] = flipped(leaves[path], device, 20)
                result = tree_like(result, list(leaves.values()))
            return result, metrics

        return step

    monkeypatch.setattr(Programs, "compiled", with_fault)
    monkeypatch.setattr(Programs, "places", lambda self, which: None)
    monkeypatch.setattr(Programs, "model_flops", lambda self, which: 0)


JOB = {"backend": "jax", "mesh": "data:8", "layout": "batch:data", "log_every": 4}


@pytest.mark.long
@pytest.mark.parametrize("every", [2, 100])
def test_a_run_ends_before_it_saves_a_fault(every, tmp_path, monkeypatch):
    faulty(monkeypatch, at=3, device=5)
    with pytest.raises(ReplicasDiffer, match="device 5 of process 0 differs") as error:
        run(tmp_path, saving=Saving(every=2), replica_check_every=every, **JOB)
    assert "after step 4; they were equal after step 2" in str(error.value)
    assert steps_in(tmp_path / "checkpoints") == [2]


def test_without_a_fault_the_losses_are_the_same_and_the_code_is_documented(monkeypatch):
    assert run(replica_check_every=1, **JOB).losses == run(**JOB).losses
    assert main._explained(ReplicasDiffer("a device differs")) == ("a device differs", DIFFERING)


def test_what_cannot_be_compared_is_told():
    with pytest.raises(ValueError, match="backend numpy has none"):
        run(replica_check_every=2)
    with pytest.raises(ValueError, match="do not divide replica_check_every=3"):
        run(replica_check_every=3, steps_per_call=2, **JOB)
    with pytest.warns(UserWarning, match=WITHOUT_REPLICAS[:60]):
        run(replica_check_every=2, backend="jax", steps=2)
