"""Missing parts of a backend: what to say where it has no line for an instruction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
            f"{instruction.source} needs: add a line to {_table(instruction, backend)} "
            "(ARCHITECTURE.md, How to add)"
        )
    return found


def _table(instruction: Instruction, backend: str) -> str:
    """Returns the table that has it in another backend, or where it may go."""
    here = Path(__file__).parent
    if instruction.is_collective:
        return f"EMITTERS in lowering/backends/{backend}/collectives.py"
    if instruction.op in KINDS and KINDS[instruction.op].elementwise:
        return f"_OWN in lowering/backends/{backend}/operations/elementwise.py"
    for file in sorted(here.glob("*/operations/*.py")) + sorted(here.glob("common/*.py")):
        if f'    "{instruction.op}": ' in file.read_text():
            folder = "common" if file.parent.name == "common" else f"{backend}/operations"
            return f"EMITTERS in lowering/backends/{folder}/{file.name}"
    return f"EMITTERS in lowering/backends/{backend}/operations, in the file of its family"
