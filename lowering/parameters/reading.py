"""Reading the parameters of an instruction as their record."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, TypeVar, cast

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction

Record = TypeVar("Record")


def parameters_of(instruction: Instruction, record: type[Record]) -> Record:
    """Returns the parameters of an instruction as a record: `parameters_of(scan, Scan)["length"]`.

    Its kind is declared with that record, or with a record that has all of its keys. `verify`
    checks parameters; this function does not.
    """
    return cast(Record, instruction.params)


class NoParameters(TypedDict):
    """The record of kinds without parameters."""
