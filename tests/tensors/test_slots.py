"""Constructors that set slots: the objects are as frozen as those of `dataclasses`."""

import inspect
from dataclasses import FrozenInstanceError, dataclass, replace
from types import SimpleNamespace

import pytest

from meshdsl.lowering.program import Instruction, Value
from meshdsl.tensors.slots import setters
from meshdsl.tracing.graph import Operation


@dataclass(frozen=True, slots=True, init=False)
class Pair:
    first: int
    second: str

    def __init__(self, first: int, second: str = "b") -> None:
        _set_first(self, first)
        _set_second(self, second)


_set_first, _set_second = setters(Pair)


def test_each_field_is_set_and_stays():
    pair = Pair(1)
    assert (pair.first, pair.second) == (1, "b")
    assert replace(pair, second="c") == Pair(1, "c")
    with pytest.raises(FrozenInstanceError):
        pair.first = 2


@pytest.mark.parametrize("kind", [Operation, Instruction, Value])
def test_what_programs_are_made_of_calls_no_setattr(kind):
    # `dataclasses` would look it up for each field.
    assert "__setattr__" not in kind.__init__.__code__.co_names
    assert kind.__dataclass_params__.frozen


@pytest.mark.parametrize("kind", [Operation, Instruction, Value])
def test_every_field_has_the_value_of_its_name(kind):
    names = list(inspect.signature(kind).parameters)
    sizes = {"itemsize": 4, "volume": 6}  # of a `Value`, which multiplies them
    values = {name: SimpleNamespace(name=name, values=list, **sizes) for name in names}
    made = kind(**values)
    assert {name: getattr(made, name) for name in names} == values
