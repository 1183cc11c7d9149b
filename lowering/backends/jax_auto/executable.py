"""The jax_auto backend: one `jax.jit` of global arrays, with constraints on their layouts.

`function` is the program as a plain JAX function of global arrays; `Executable` is that function
compiled for the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends import jax as of_jax
from meshdsl.lowering.backends.compiler_flags import Flag, of_any_program
from meshdsl.lowering.backends.jax.executable import check_dtypes, device_mesh
from meshdsl.lowering.backends.jax_auto.emitters import EMITTERS
from meshdsl.lowering.backends.jax_auto.machine import GlobalMachine
from meshdsl.lowering.program import SpmdProgram


class Executable(of_jax.Executable):
    """A program of global tensors compiled for the devices of its mesh; see the jax backend's."""

    def recommended(self, device: Any) -> Mapping[str, Flag]:
        """Returns the compiler's flags for a device."""
        return of_any_program(super().recommended(device))

    def traceable(self, mesh: jax.sharding.Mesh, platform: str | None) -> Callable:
        """Returns the program as a jittable function of global arrays."""
        return function(self.program, mesh)


def function(program: SpmdProgram, mesh: jax.sharding.Mesh | None = None) -> Callable:
    """Returns the program as a jittable function of its inputs, as global arrays."""
    check_dtypes(program)
    devices = None
    if program.mesh.size > 1:
        devices = mesh or device_mesh(program.mesh)

    def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        # XLA cannot partition fused kernels, so the platform is one without any.
        machine = GlobalMachine(Mesh(), EMITTERS, "", split_over=program.mesh, devices=devices)
        return tuple(machine.run(program.block, arrays))

    return whole
