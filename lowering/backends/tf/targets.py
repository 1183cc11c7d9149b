"""The choice of devices for a program: the TPU that is named, else hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdsl.lowering.backends.tf.hosts import executable as host
from meshdsl.lowering.backends.tf.tpus import devices as tpu_devices
from meshdsl.lowering.backends.tf.tpus import executable as tpu_executable
from meshdsl.lowering.backends.tf.tpus.program import refuse_effects, replica
from meshdsl.lowering.program import SpmdProgram


def Executable(program: SpmdProgram, donated: Sequence[bool] = (), devices: Any = None) -> Any:
    """Returns a program compiled for the devices of its mesh.

    Raises:
        ValueError: the devices do not exist, or their number is not the mesh's; a TPU is named, but
            `devices` are given, too; or the program prints, on a TPU.
    """
    if not tpu_devices.named():
        return host.Executable(program, donated, devices)
    if devices is not None:
        raise ValueError(
            f"the TPU {tpu_devices.named()!r} is named, by --tpu or {tpu_devices.NAME}, and all "
            "its cores run the program: leave out `devices`, or the name to run on hosts"
        )
    refuse_effects(program)
    strategy = tpu_devices.strategy(program.mesh)
    return tpu_executable.Executable(program, donated, strategy, replica(program))
