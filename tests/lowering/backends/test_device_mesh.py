"""The devices of a mesh, where several processes have some."""

from types import SimpleNamespace

import jax
import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.jax import device_mesh


@pytest.mark.parametrize(
    ("processes", "idle"), [((0, 1, 2), "process 2"), ((0, 0, 1, 1, 2, 2, 3), "process 1, 2, 3")]
)
def test_a_process_without_a_device_of_the_mesh_is_named(monkeypatch, processes, idle):
    """It ended with an error of JAX's, and `launch` started all of them again and again."""
    devices = [SimpleNamespace(process_index=number, platform="cpu") for number in processes]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match="mesh data:2 has 2 devices, and the") as error:
        device_mesh(Mesh.parse("data:2"))
    assert f"nothing is left to do for {idle}. Use a mesh of {len(devices)}" in str(error.value)


def test_a_process_may_have_devices_that_the_mesh_has_not():
    assert device_mesh(Mesh.parse("data:2")).size == 2 < len(jax.devices())
