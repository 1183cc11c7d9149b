"""Where mesh axes lie on TPU slices that are not there: on lines of a torus, and across slices."""

import itertools
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.jax.ahead import devices
from meshdsl.lowering.backends.jax.torus import arrange_devices

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")


def laid(topology, mesh, slices=1):
    return arrange_devices(Mesh.parse(mesh), devices(Topology.parse(topology, slices)))


def hops(one, other, sides):
    """Returns the links between two chips of a torus."""
    apart = (abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
    return sum(min(d, side - d) for d, side in zip(apart, sides, strict=True))


@needs_libtpu
@pytest.mark.parametrize("text", ["data:64,model:8", "model:8,data:64", "data:8,row:8,model:8"])
def test_neighbours_along_an_axis_of_eight_are_neighbours_on_the_torus(text):
    mesh = laid("v5p:8x8x8", text)
    assert mesh.axis_names == Mesh.parse(text).names
    assert len({device.id for device in mesh.devices.flat}) == 512
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index("model"), -1).reshape(-1, 8)
    for line in lines:
        pairs = itertools.pairwise([*line, line[0]])
        assert all(hops(one, other, (8, 8, 8)) == 1 for one, other in pairs)


@needs_libtpu
@pytest.mark.parametrize("text", ["slice@dcn:2,data:32,model:8", "data:32,slice@dcn:2,model:8"])
def test_a_marked_axis_goes_across_slices_and_no_other_does(text):
    mesh = laid("v5e:16x16", text, slices=2)
    where = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    across = np.moveaxis(where, mesh.axis_names.index("slice"), 0).reshape(2, -1)
    assert (across == np.array([[0], [1]])).all()


@needs_libtpu
def test_slices_need_a_marked_axis_of_their_number():
    with pytest.raises(ValueError) as error:
        laid("v5e:2x4", "data:4,model:4", slices=2)
    assert str(error.value) == (
        "the devices are of 2 slices, so the axes of mesh data:4 model:4 that go across them must "
        "have as many places: mark them, as in slice@dcn:2"
    )


@needs_libtpu
@pytest.mark.parametrize("name", ["v3:2x2", "v4:2x2x2", "v6e:2x4"])
def test_both_cores_of_a_chip_of_v3_are_devices_and_of_v4_are_one(name):
    found = devices(Topology.parse(name))
    assert len(found) == Topology.parse(name).devices == 8
    assert laid(name, "data:2,model:4").devices.shape == (2, 4)


def test_other_devices_are_taken_as_they_are_numbered():
    mesh = arrange_devices(Mesh.parse("slice@dcn:2,model:4"), jax.devices())
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert arrange_devices(Mesh(), jax.devices()[:1]).devices.shape == ()
