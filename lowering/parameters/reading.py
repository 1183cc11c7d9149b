"""Reading the parameters of an instruction as their record."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, TypeVar, cast

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction

Record = TypeVar("Record")


def parameters_of(instruction: Instruction, record: type[Record]) -> Record:
    """Returns the parameters of an instruction as a record: `parameters_of(scan, Scan)["length"]`.

    The record is the one that its kind is declared with, or another one with some of its keys. It
    is not checked here: `verify` checks it.
    """
    return cast(Record, instruction.params)


class NoParameters(TypedDict):
    """The record of kinds without parameters."""
