"""Where the devices of a mesh are on a TPU, and what is told when there is none."""

import itertools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow as tf

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf import Executable
from meshdsl.lowering.backends.tf.tpus import devices as tpu_devices
from meshdsl.lowering.backends.tf.tpus.links import TpuLinks
from meshdsl.lowering.backends.tf.tpus.program import refuse_effects


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
        apart = [_links(one, other) for one, other in itertools.pairwise(row)]
        assert apart == [1, 1, 1, 2] * 3 + [1, 1, 1]  # a ring of four in each of four rows
    for column in places.swapaxes(0, 1):
        assert [_links(*pair) for pair in itertools.pairwise([*column, column[0]])] == [1] * 4


def _links(one, other, around=4):
    """Returns how many links of a torus are between two cores."""
    apart = np.abs(one - other)
    return int(np.minimum(apart, around - apart).sum())


def test_the_cores_of_a_chip_are_beside_each_other():
    found = tpu_devices.core_assignment(topology(4, 4, 1, 2), Mesh.parse("data:4,model:8"))
    for row in found.reshape(4, 4, 2, 4):
        for one, other in row:
            assert (one[:3] == other[:3]).all() and one[3] != other[3]


def test_a_tpu_that_is_not_there_is_reported_with_what_was_looked_for(monkeypatch):
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


def test_a_mesh_has_one_strategy(monkeypatch):
    made = []

    def strategy(resolver, experimental_device_assignment):
        made.append(experimental_device_assignment)
        return object()

    monkeypatch.setenv("TPU_NAME", "one of a test")
    monkeypatch.setattr(tpu_devices, "connect", lambda name: (None, topology(2, 2, 1)))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", strategy)
    first, other = Mesh.parse("a:2,b:2"), Mesh.parse("a:4")
    assert tpu_devices.strategy(first) is tpu_devices.strategy(Mesh.parse("a:2,b:2"))
    assert tpu_devices.strategy(first) is not tpu_devices.strategy(other)
    assert len(made) == 2


def test_devices_that_are_named_beside_a_tpu_are_reported(monkeypatch):
    program = md.jit(lambda x: x + 1, "x:2", "a:x").lower(md.named(np.ones(4), ["a"]))
    monkeypatch.setenv("TPU_NAME", "local")
    with pytest.raises(ValueError) as error:
        Executable(program, (), ["CPU:0", "CPU:1"])
    assert str(error.value) == (
        "the TPU 'local' is named, by --tpu or TPU_NAME, and all its cores run the program: leave "
        "out `devices`, or the name to run on hosts"
    )


def test_prints_are_reported_with_their_lines():
    x = md.named(np.ones(4), ["a"])
    with pytest.raises(ValueError) as error:
        refuse_effects(md.jit(lambda x: (md.print("x {}", x), x)[1], "x:2", "a:x").lower(x))
    first, line = str(error.value).split("\n")
    assert first == (
        "<lambda> prints, which a program on a TPU cannot: return the values as results, "
        "or run it on hosts, without --tpu and TPU_NAME"
    )
    assert line.startswith("  at ") and "tpus/test_devices.py" in line and "md.print(" in line


def in_a_process(code, **environment):
    """Returns the lines that a process of its own prints, with no platform told to JAX."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "TPU_NAME")}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    return told.stdout.strip().split("\n")


@pytest.mark.long
def test_jax_stays_on_the_cpu_where_tensorflow_has_the_tpu():
    code = (
        "import jax; from meshdsl.cli.job import use_tpu; use_tpu(None, 'jax'); "
        "print(jax.config.jax_platforms); use_tpu('local', 'tf'); "
        "print(jax.config.jax_platforms); jax.config.update('jax_platforms', None)\n"
        "from meshdsl.lowering.backends.tf.tpus import devices\n"
        "try: devices.connect('grpc://127.0.0.1:9')\n"
        "except ValueError as error: assert 'does not answer' in str(error)\n"
        "print(jax.config.jax_platforms, jax.default_backend())"
    )
    assert in_a_process(code) == ["None", "cpu", "cpu cpu"]


def test_a_tpu_that_jax_has_is_reported(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError) as error:
        tpu_devices.connect("one that JAX has")
    assert str(error.value) == (
        "the TPU 'one that JAX has' cannot be TensorFlow's: JAX has started it in this "
        "process; begin with jax.config.update('jax_platforms', 'cpu'), or set JAX_PLATFORMS=cpu"
    )


def test_numbers_of_64_bits_keep_them_where_jax_has_32():
    x = md.named(np.array([1 + 1e-12, 2, 3, 4]), ["a"])

    def less(x):
        return md.local(lambda a: a - 1, x, out=x.dims, split="a", gradient=None)

    with jax.enable_x64(False):
        found = np.asarray(md.jit(less, "x:2", "a:x", "tf")(x))
        values = [tf.constant(1 + 1e-12, tf.float64), tf.constant(2**40 + 1, tf.int64)]
        links = TpuLinks(md.Mesh())
        kept = tf.function(lambda *values: links.barrier(values), autograph=False)(*values)
    np.testing.assert_array_equal(found, np.asarray(x) - 1)
    for one, other in zip(kept, values, strict=True):
        assert one.dtype == other.dtype and one == other
