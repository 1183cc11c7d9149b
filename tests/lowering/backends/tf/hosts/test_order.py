"""The order in which TensorFlow has the devices of a group, asked of this machine's CPUs."""

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.hosts import order as host_order
from meshdsl.lowering.backends.tf.hosts.devices import host_devices


@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "y"), ("y", "x")])
def test_devices_gather_their_numbers_in_the_order_of_the_mesh(axes):
    mesh = Mesh.parse("x:2,y:4")
    devices = host_devices(mesh)
    found = host_order.numbers(devices, mesh, axes)
    for number, row in enumerate(found):
        assert [row] == [list(group) for group in mesh.groups(*axes) if number in group]
    host_order.check_order(devices, mesh, [axes])


def test_groups_are_asked_once(monkeypatch):
    mesh, asked = Mesh.parse("x:2,other:3,one:1"), []
    gathered = host_order.numbers
    monkeypatch.setattr(
        host_order, "numbers", lambda *args: asked.append(args[2]) or gathered(*args)
    )
    for _ in range(2):
        host_order.check_order(host_devices(mesh), mesh, [("x",), ("other",), ("one",)])
    assert asked == [("x",), ("other",)]


def test_another_order_is_reported():
    mesh = Mesh.parse("x:2,y:2")
    found = [[0, 1], [0, 1], [3, 2], [3, 2]]
    with pytest.raises(ValueError) as error:
        host_order.check_numbers(host_devices(mesh), mesh, ("y",), found)
    assert str(error.value) == (
        "TensorFlow has the devices [2, 3] of mesh x:2 y:2, along y, in the order [3, 2], by the "
        "strength of their links: make them visible in an order in which neighbours have strong "
        "ones, by CUDA_VISIBLE_DEVICES, or run one process for each GPU"
    )
