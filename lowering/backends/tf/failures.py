"""What went wrong on the devices, in the words of the program."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from meshdsl.lowering.backends import DeviceError
from meshdsl.lowering.backends.tf.placing import Devices
from meshdsl.lowering.program import Instruction
from meshdsl.mesh import Mesh

_TELLING = re.compile(r"collective|connection|timed out|socket|unavailable", re.IGNORECASE)
_PLACES = re.compile(r"Graph execution error|Detected at node|stack traces|\{\{node|^\s*File ")


def told(
    error: tf.errors.OpError,
    mesh: Mesh,
    instructions: Sequence[Instruction],
    reached: Sequence[int],
    devices: Devices,
) -> Exception:
    """Returns the error to raise for one of TensorFlow's.

    Args:
        reached: of each of this process's devices, the number of the last instruction that is a
            collective and has begun; -1 for none.
    """
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return RuntimeError(f"RESOURCE_EXHAUSTED: {error.message}")
    lines = ["a collective has failed, and TensorFlow runs no other in this process"]
    waiting: dict[int, list[int]] = {}
    for number, at in zip(devices.numbers, reached, strict=True):
        waiting.setdefault(at, []).append(number)
    for at, held in sorted(waiting.items()):
        lines.append(f"{_devices(held)} {_place(instructions, at)}")
    lines += _missing(mesh, instructions, waiting, devices)
    lines.append(f"TensorFlow says: {_said(error)}")
    lines.append("start all processes of the job again")
    return DeviceError("\n  ".join(lines))


def _said(error: tf.errors.OpError) -> str:
    """Returns the line of an error that tells most of a failed collective."""
    lines = [line.strip() for line in error.message.split("\n") if not _PLACES.search(line)]
    told = [line for line in lines if _TELLING.search(line)] or [line for line in lines if line]
    return told[0] if told else type(error).__name__


def _place(instructions: Sequence[Instruction], at: int) -> str:
    if not 0 <= at < len(instructions):
        return "had begun no collective"
    one = instructions[at]
    over = ", ".join(one.params["axes"])
    return f"had come to {one.op} over {over} at {one.source}  {one.source.code}".rstrip()


def _missing(
    mesh: Mesh,
    instructions: Sequence[Instruction],
    waiting: dict[int, list[int]],
    devices: Devices,
) -> list[str]:
    """Returns what is known of the devices that the first ones to wait have waited for."""
    cluster = devices.cluster
    silent, share = cluster.silent(), len(devices.numbers)
    lines = []
    for place in silent:
        numbers = range(place * share, (place + 1) * share)
        lines.append(
            f"{_devices(numbers)} are missing: process {place} at {cluster.addresses[place]} does "
            "not answer"
        )
    furthest = max(waiting)
    if 0 <= furthest < len(instructions) and not silent:
        axes, here = instructions[furthest].params["axes"], set(waiting[furthest])
        groups = [group for group in mesh.groups(*axes) if here & set(group)]
        late = sorted({device for group in groups for device in group} - here)
        if late:
            lines.append(f"{_devices(late)} had not come there; every process answers")
    return lines


def _devices(numbers: Sequence[int]) -> str:
    many = "s" if len(numbers) > 1 else ""
    return f"device{many} {', '.join(map(str, numbers))}"
