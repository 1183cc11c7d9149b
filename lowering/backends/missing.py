"""Missing parts of a backend: what to say where it has no line for an instruction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

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
    """Returns the file that has it in another backend, or where it may go."""
    if instruction.is_collective:
        return "collectives.py"
    for file in sorted(Path(__file__).parent.glob("*/operations/*.py")):
        if f'    "{instruction.op}": ' in file.read_text():
            return f"operations/{file.name}"
    return "operations, in the file of its family"
