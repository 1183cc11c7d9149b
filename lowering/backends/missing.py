"""Missing emitters: the error for an instruction that a backend does not know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from meshdsl.lowering.instructions import KINDS
from meshdsl.lowering.program import Instruction

T = TypeVar("T")
_RULES = Path(__file__).parents[1] / "partition"


def emitter_of(emitters: Mapping[str, T], instruction: Instruction, backend: str) -> T:
    """Returns the emitter of an instruction: `emitter_of(EMITTERS, instruction, "numpy")`.

    Raises:
        ValueError: the backend has no emitter for it; the message names the file for one.
    """
    emitter = emitters.get(instruction.op)
    if emitter is None:
        raise ValueError(
            f"backend {backend!r} has no emitter for instruction `{instruction.op}`, which "
            f"{instruction.source} needs: add a line to {_table(instruction, backend)} "
            "(ARCHITECTURE.md, How to add)"
        )
    return emitter


def _table(instruction: Instruction, backend: str) -> str:
    """Returns the table and the file for an emitter, as other backends have it."""
    folder = Path(__file__).parent
    if instruction.is_collective:
        return f"EMITTERS in lowering/backends/{backend}/collectives.py"
    if instruction.op in KINDS and KINDS[instruction.op].elementwise:
        return f"_OWN in lowering/backends/{backend}/operations/elementwise.py"
    for file in sorted(folder.glob("*/operations/*.py")) + sorted(folder.glob("common/*.py")):
        if f'    "{instruction.op}": ' in file.read_text():
            room = "common" if file.parent.name == "common" else f"{backend}/operations"
            return f"EMITTERS in lowering/backends/{room}/{file.name}"
    operations = f"lowering/backends/{backend}/operations"
    family = _family(instruction.op)
    if not family:
        return f"EMITTERS in {operations}, in the file of its family"
    if (folder / backend / "operations" / f"{family}.py").exists():
        return f"EMITTERS in {operations}/{family}.py"
    return (
        f"EMITTERS in the new file {operations}/{family}.py, and the file to "
        f"lowering/backends/{backend}/emitters.py"
    )


def _family(name: str) -> str:
    """Returns the family of the partition rule that writes an instruction; empty if none does."""
    for file in sorted(_RULES.rglob("*.py")):
        if f'"{name}"' in file.read_text():
            return file.relative_to(_RULES).parts[0].removesuffix(".py")
    return ""
