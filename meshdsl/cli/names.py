"""`meshdsl names file.py:function`: the names that `md.from_jax` infers, line by line."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from meshdsl.cli.mistakes.problems import Problems
from meshdsl.imports.jax.function import FromJax
from meshdsl.models.own import attribute_of
from meshdsl.training.reporting.output import tell

_FORM = (
    "a function without arguments that returns a program and its arguments, as in\n"
    "  def example():\n"
    '      return md.from_jax(loss, names={"x": "batch embed"}), params, x'
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
    tell(program.listing(*arguments))
    return 0
