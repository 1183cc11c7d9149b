"""Where the devices of a mesh are on a TPU, and what is told when there is none."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import meshdsl as md
from meshdsl.lowering.backends.tf import tpu_devices
from meshdsl.mesh import Mesh


def topology(x, y, z, cores=1, tasks=1):
    """Returns TensorFlow's description of a TPU whose tasks have its chips in slices of y."""
    places = [
        [(i, j, k, core) for k in range(z) for j in part for i in range(x) for core in range(cores)]
        for part in np.split(np.arange(y), tasks)
    ]
    return tf.tpu.experimental.Topology(
        mesh_shape=[x, y, z, cores], device_coordinates=np.array(places, np.int32)
    )


@pytest.mark.parametrize(
    "sizes, mesh",
    [
        ((2, 2, 2), "data:2,model:4"),
        ((4, 4, 4), "data:4,model:16"),
        ((4, 4, 1, 2), "data:4,model:8"),
        ((4, 4, 1, 2, 2), "a:2,b:4,c:4"),
        ((2, 2, 1), ""),
    ],
)
def test_every_core_has_one_device(sizes, mesh):
    there = topology(*sizes)
    mesh = Mesh.parse(mesh) if mesh else Mesh((("x", 4),))
    found = tpu_devices.core_assignment(there, mesh)
    assert found.shape == (mesh.size, 1, 4)
    assert len({tuple(place) for place in found[:, 0].tolist()}) == mesh.size
    assignment = tf.tpu.experimental.DeviceAssignment(there, found)  # it checks them
    assert assignment.num_replicas == mesh.size


def test_neighbours_along_an_axis_are_neighbours_on_the_torus():
    found = tpu_devices.core_assignment(topology(4, 4, 4), Mesh.parse("data:4,model:16"))
    places = found.reshape(4, 16, 4)
    for row in places:
        assert len({tuple(np.ptp(row, 0) > 0)}) == 1
        for one, other in itertools.pairwise(row):
            apart = np.abs(one - other)
            assert (np.minimum(apart, 4 - apart) > 0).sum() <= 2


def test_the_cores_of_a_chip_are_beside_each_other():
    found = tpu_devices.core_assignment(topology(4, 4, 1, 2), Mesh.parse("data:4,model:8"))
    for row in found.reshape(4, 4, 2, 4):
        for one, other in row:
            assert (one[:3] == other[:3]).all() and one[3] != other[3]


def test_a_tpu_that_is_not_there_is_told_with_what_was_looked_for(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "grpc://127.0.0.1:9")
    with pytest.raises(ValueError) as error:
        md.jit(lambda x: x + 1, "x:2", "a:x", "tf")(md.named(np.ones(4), ["a"]))
    assert str(error.value) == (
        "no TPU found: looked for 'grpc://127.0.0.1:9', the value of --tpu or of TPU_NAME, through "
        "TensorFlow's TPUClusterResolver, which says: 127.0.0.1:9 does not answer. Name one: "
        "--tpu=local on a TPU VM, --tpu=NAME or --tpu=grpc://address for one in the network; leave "
        "both out to run on hosts"
    )


def test_a_mesh_has_as_many_devices_as_the_tpu_has_cores(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    monkeypatch.setattr(tpu_devices, "connect", lambda name: (None, topology(2, 2, 1, 2)))
    with pytest.raises(ValueError) as error:
        tpu_devices.strategy(Mesh.parse("data:2,model:2"))
    assert str(error.value) == (
        "mesh data:2 model:2 has 4 devices, but the TPU 'local' has 8 cores (2x2x1x2): a mesh has "
        "one device for each core"
    )
