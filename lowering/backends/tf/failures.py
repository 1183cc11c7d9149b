"""Failures on the devices, reported in terms of the program.

Each instruction is emitted in a name scope of its own, `op.number`, which TensorFlow's errors
quote. If a collective failed, or anything else because of one, the report says where each device
was. Any other error remains as it is; a note adds its line of the program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends import DeviceError
from meshdsl.lowering.backends.tf.arguments import Devices
from meshdsl.lowering.backends.tf.hosts.tokens import instruction as instruction_of
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import Instruction

_CAUSE = re.compile(r"collective|connection|timed out|socket|unavailable", re.IGNORECASE)
_LOST = re.compile(r"Collective ops is aborted|RecvBuf|failed to connect|Socket closed")
_LOCATION = re.compile(r"Graph execution error|Detected at node|stack traces|\{\{node|^\s*File ")
_NODES = re.compile(r"(?:node |node ')([\w./<>-]+)")
_SCOPES = re.compile(r"\b(\w+)\.(\d+)/")


def explain_failure(
    error: tf.errors.OpError,
    mesh: Mesh,
    instructions: Sequence[Instruction],
    tokens: Sequence[int],
    devices: Devices,
    timed_out: bool,
) -> None:
    """Raises an error that explains one of TensorFlow's, or adds a note to it and returns.

    Args:
        tokens: those of this process's devices (see `tokens`).
        timed_out: whether the watchdog aborted the call, because a collective took too long.

    Raises:
        DeviceError: a collective has failed.
        RuntimeError: the devices have too little memory.
    """
    if isinstance(error, tf.errors.ResourceExhaustedError):
        raise RuntimeError(f"RESOURCE_EXHAUSTED: {error.message}") from error
    cause = _cause_of(error, instructions)
    waiting: dict[int | None, list[int]] = {}
    for number, token in zip(devices.numbers, tokens, strict=True):
        waiting.setdefault(instruction_of(token), []).append(number)
    by_collective = len(devices.cluster.addresses) > 1 or _LOST.search(error.message)
    if not timed_out and not (cause.is_collective if cause else by_collective):
        error.add_note(f"in {cause.op} at {_line(cause)}" if cause else _unknown(waiting))
        if set(waiting) != {None}:
            error.add_note(
                "devices waited for it in collectives; if others over the same devices fail from "
                "here on, start all processes again"
            )
        return
    lines = ["a collective has failed, and TensorFlow runs no other in this process"]
    for at, numbers in sorted(waiting.items(), key=lambda item: item[1]):
        lines.append(_position(instructions, at, numbers))
    lines += _missing_devices(mesh, instructions, waiting, devices)
    lines.append(f"TensorFlow says: {_cause_line(error)}")
    lines.append("start all processes of the job again")
    raise DeviceError("\n  ".join(lines)) from error


def _cause_of(error: tf.errors.OpError, instructions: Sequence[Instruction]) -> Instruction | None:
    """Returns the instruction that an error names; one that is no collective comes first."""
    # If an operation fails, the error also names the collectives in which other devices wait.
    named = []
    for node in _NODES.findall(error.message):
        for op, number in reversed(_SCOPES.findall(node)):  # the innermost one comes last
            if int(number) < len(instructions) and instructions[int(number)].op == op:
                named.append(instructions[int(number)])
                break
    return min(named, key=lambda instruction: instruction.is_collective, default=None)


def _cause_line(error: tf.errors.OpError) -> str:
    """Returns the line of an error's message with the cause of a failed collective."""
    lines = [line.strip() for line in error.message.split("\n") if not _LOCATION.search(line)]
    causes = [line for line in lines if _CAUSE.search(line)] or [line for line in lines if line]
    return causes[0] if causes else type(error).__name__


def _line(instruction: Instruction) -> str:
    """Returns where the user's code has an instruction, and the code."""
    return f"{instruction.source}  {instruction.source.code}".rstrip()


def _position(instructions: Sequence[Instruction], at: int | None, numbers: Sequence[int]) -> str:
    """Returns the line of the report for devices that are in one collective, or in none."""
    if at is None:
        return f"{_devices(numbers)} {'was' if len(numbers) == 1 else 'were'} in no collective"
    instruction = instructions[at]
    over = ", ".join(axes_of(instruction))
    return f"{_devices(numbers)} had reached {instruction.op} over {over} at {_line(instruction)}"


def _unknown(waiting: dict[int | None, list[int]]) -> str:
    """Returns the note for an error that names no instruction."""
    note = "an operation has failed, and TensorFlow reports only the operations that it ended"
    return f"{note}; {_position((), None, waiting[None])}" if None in waiting else note


def _missing_devices(
    mesh: Mesh,
    instructions: Sequence[Instruction],
    waiting: dict[int | None, list[int]],
    devices: Devices,
) -> list[str]:
    """Returns the lines of the report on devices that others have waited for."""
    cluster = devices.cluster
    unreachable, share = cluster.unreachable(), len(devices.numbers)
    lines = []
    for process in unreachable:
        numbers = range(process * share, (process + 1) * share)
        lines.append(
            f"{_devices(numbers)} are missing: process {process} at "
            f"{cluster.addresses[process]} does "
            "not answer"
        )
    inside = [at for at in waiting if at is not None]
    if inside and not unreachable:
        furthest = max(inside)
        axes, arrived = axes_of(instructions[furthest]), set(waiting[furthest])
        groups = [group for group in mesh.groups(*axes) if arrived & set(group)]
        late = sorted({device for group in groups for device in group} - arrived)
        if late:
            lines.append(f"{_devices(late)} had not reached it; every process answers")
    return lines


def _devices(numbers: Sequence[int]) -> str:
    plural = "s" if len(numbers) > 1 else ""
    return f"device{plural} {', '.join(map(str, numbers))}"
