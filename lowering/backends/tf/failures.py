"""What went wrong on the devices, in the words of the program.

Every instruction is emitted under a name of its own, `op.number`, which TensorFlow's errors quote.
What failed in a collective, or because of one, is told with where each device was; everything else
keeps its error, with the line of the program that it came from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends import DeviceError
from meshdsl.lowering.backends.tf.hosts.tokens import instruction as instruction_of
from meshdsl.lowering.backends.tf.placing import Devices
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import Instruction

_TELLING = re.compile(r"collective|connection|timed out|socket|unavailable", re.IGNORECASE)
_LOST = re.compile(r"Collective ops is aborted|RecvBuf|failed to connect|Socket closed")
_PLACES = re.compile(r"Graph execution error|Detected at node|stack traces|\{\{node|^\s*File ")
_NODES = re.compile(r"(?:node |node ')([\w./<>-]+)")
_SCOPES = re.compile(r"\b(\w+)\.(\d+)/")


def told(
    error: tf.errors.OpError,
    mesh: Mesh,
    instructions: Sequence[Instruction],
    held: Sequence[int],
    devices: Devices,
    ended: bool,
) -> None:
    """Raises the error to tell for one of TensorFlow's, or notes in that where it comes from.

    Args:
        held: of each of this process's devices, its token (see `tokens`).
        ended: whether the call was ended for a collective that took too long.

    Raises:
        DeviceError: a collective has failed.
        RuntimeError: the devices have too little memory.
    """
    if isinstance(error, tf.errors.ResourceExhaustedError):
        raise RuntimeError(f"RESOURCE_EXHAUSTED: {error.message}") from error
    blamed = _blamed(error, instructions)
    waiting: dict[int | None, list[int]] = {}
    for number, token in zip(devices.numbers, held, strict=True):
        waiting.setdefault(instruction_of(token), []).append(number)
    by_others = len(devices.cluster.addresses) > 1 or _LOST.search(error.message)
    if not ended and not (blamed.is_collective if blamed else by_others):
        error.add_note(f"in {blamed.op} at {_line(blamed)}" if blamed else _unknown(waiting))
        if set(waiting) != {None}:
            error.add_note(
                "devices waited for it in collectives; if others over the same devices fail from "
                "here on, start all processes again"
            )
        return
    lines = ["a collective has failed, and TensorFlow runs no other in this process"]
    for at, there in sorted(waiting.items(), key=lambda item: item[1]):
        lines.append(_place(instructions, at, there))
    lines += _missing(mesh, instructions, waiting, devices)
    lines.append(f"TensorFlow says: {_said(error)}")
    lines.append("start all processes of the job again")
    raise DeviceError("\n  ".join(lines)) from error


def _blamed(error: tf.errors.OpError, instructions: Sequence[Instruction]) -> Instruction | None:
    """Returns the instruction whose operation an error names: no collective, if it names others.

    Where an operation fails, the collectives that others wait in are named with it.
    """
    found = []
    for node in _NODES.findall(error.message):
        for op, number in reversed(_SCOPES.findall(node)):  # the innermost one comes last
            if int(number) < len(instructions) and instructions[int(number)].op == op:
                found.append(instructions[int(number)])
                break
    return min(found, key=lambda one: one.is_collective, default=None)


def _said(error: tf.errors.OpError) -> str:
    """Returns the line of an error that tells most of a failed collective."""
    lines = [line.strip() for line in error.message.split("\n") if not _PLACES.search(line)]
    told = [line for line in lines if _TELLING.search(line)] or [line for line in lines if line]
    return told[0] if told else type(error).__name__


def _line(one: Instruction) -> str:
    return f"{one.source}  {one.source.code}".rstrip()


def _place(instructions: Sequence[Instruction], at: int | None, there: Sequence[int]) -> str:
    if at is None:
        return f"{_devices(there)} {'was' if len(there) == 1 else 'were'} in no collective"
    one = instructions[at]
    over = ", ".join(axes_of(one))
    return f"{_devices(there)} had come to {one.op} over {over} at {_line(one)}"


def _unknown(waiting: dict[int | None, list[int]]) -> str:
    """Returns what there is to say where an error names nothing of the program."""
    note = "an operation has failed, and TensorFlow tells only of what that has ended"
    return f"{note}; {_place((), None, waiting[None])}" if None in waiting else note


def _missing(
    mesh: Mesh,
    instructions: Sequence[Instruction],
    waiting: dict[int | None, list[int]],
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
    inside = [at for at in waiting if at is not None]
    if inside and not silent:
        furthest = max(inside)
        axes, here = axes_of(instructions[furthest]), set(waiting[furthest])
        groups = [group for group in mesh.groups(*axes) if here & set(group)]
        late = sorted({device for group in groups for device in group} - here)
        if late:
            lines.append(f"{_devices(late)} had not come there; every process listens")
    return lines


def _devices(numbers: Sequence[int]) -> str:
    many = "s" if len(numbers) > 1 else ""
    return f"device{many} {', '.join(map(str, numbers))}"
