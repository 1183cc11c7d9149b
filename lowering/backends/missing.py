"""Missing parts of a backend: what to say where it has no line for an instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from meshdsl.lowering.instructions import KINDS
from meshdsl.lowering.program import Instruction

T = TypeVar("T")


def emitter_of(emitters: Mapping[str, T], instruction: Instruction, backend: str) -> T:
    """Returns what emits an instruction: `emitter_of(EMITTERS, instruction, "numpy")`.

    Raises:
        ValueError: the backend has nothing for it; the message names the file to put it in.
    """
    found = emitters.get(instruction.op)
    if found is None:
        raise ValueError(
            f"backend {backend!r} has no emitter for instruction `{instruction.op}`, which "
            f"{instruction.source} needs: add a line to EMITTERS in lowering/backends/{backend}/"
            f"{_file(instruction)} (ARCHITECTURE.md, How to add)"
        )
    return found


def _file(instruction: Instruction) -> str:
    if instruction.is_collective:
        return "collectives.py"
    kind = KINDS.get(instruction.op)
    if kind is not None and kind.elementwise:
        return "operations/elementwise.py, or special.py beside it"
    return "operations, in the file of its family"
