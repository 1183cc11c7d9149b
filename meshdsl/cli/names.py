"""`meshdsl names file.py:function`: the names that `md.from_jax` infers, line by line."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from absl import flags

from meshdsl.cli.mistakes.problems import Problems
from meshdsl.imports.jax.function import FromJax
from meshdsl.models.own import attribute_of
from meshdsl.training.reporting.output import tell

_FORM = (
    "a function without arguments that returns a program and its arguments, as in\n"
    "  def example():\n"
    '      program = md.from_jax(loss, names={"x": "batch embed"})\n'
    "      return program, params, x"
)


def main(values: flags.FlagValues, problems: Problems, places: Sequence[str] = ()) -> int:
    """Runs the command; returns its exit code.

    Args:
        places: what to list, `my_model.py:example` or `my_package.my_model:example`.

    Raises:
        ValueError: there is no such function, it returns something else, or the program cannot be
            converted.
    """
    if len(places) != 1:
        problems.add(f"say which function: meshdsl names my_model.py:example, {_FORM}")
    problems.check()
    (place,) = places
    function = attribute_of(place)
    result = function() if callable(function) and not isinstance(function, FromJax) else None
    if not isinstance(result, tuple) or not result or not isinstance(result[0], FromJax):
        raise ValueError(f"{place} is not {_FORM}")
    program, *arguments = result
    _check_arguments(place, program, arguments)
    tell(program.listing(*arguments))
    return 0


def _check_arguments(place: str, program: FromJax, arguments: Sequence[object]) -> None:
    """Raises ValueError if the function that is converted cannot be called with the arguments."""
    try:
        inspect.signature(program.function).bind(*arguments)
    except TypeError as error:
        hint = ""
        if len(arguments) == 1 and isinstance(arguments[0], tuple):
            hint = ". The arguments are in a tuple: return them one by one, without parentheses"
        raise ValueError(
            f"{place} returns a program and {len(arguments)} argument"
            f"{'s' * (len(arguments) != 1)}, but {program.__name__} does not take these: "
            f"{error}{hint}. It must be {_FORM}"
        ) from None
