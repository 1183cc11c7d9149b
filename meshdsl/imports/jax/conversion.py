"""Conversion: each equation of a jaxpr becomes operations of the language, at the user's line.

Invariant: after each equation the single dims of an array have the names that inference gave to
their positions. Where the program lets two of them meet, the operation's rule renames one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from meshdsl.imports.jax.arrays import Array, fit, plain
from meshdsl.imports.jax.inference import Frame, is_uniform, labels
from meshdsl.imports.jax.naming import Naming
from meshdsl.ops.literal import literal
from meshdsl.ops.random_keys import KEY
from meshdsl.tensors.named_array import named
from meshdsl.tracing.source import Source
from meshdsl.tracing.trace import located


class Unfit(ValueError):
    """An equation that has no translation; the message says why."""


@dataclass(frozen=True)
class Site:
    """One equation, while it is converted.

    Attributes:
        inputs, outputs: the names of the positions of its operands and results.
    """

    conversion: Conversion
    frame: Frame
    number: int
    equation: Any
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]

    @property
    def params(self) -> Mapping[str, Any]:
        return self.equation.params

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def source(self) -> Source:
        return self.frame.sources[self.number]

    def sizes(self, result: int = 0) -> tuple[int, ...]:
        """Returns the sizes of a result."""
        return tuple(self.equation.outvars[result].aval.shape)

    def dtype(self, result: int = 0) -> np.dtype:
        """Returns the dtype of a result."""
        return np.dtype(self.equation.outvars[result].aval.dtype)

    def plain(self, operands: Sequence[Array], number: int = 0) -> Array:
        """Returns an operand with one dim at each position."""
        return plain(operands[number], self.inputs[number])

    def body(self, number: int) -> Frame:
        """Returns the frame of a body."""
        return self.frame.bodies[self.number][number]

    def run(self, number: int, operands: Sequence[Array]) -> list[Array]:
        """Returns the results of a body, computed in its place."""
        return self.conversion.run(self.body(number), operands)

    def labels(self, number: int) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Returns the names in the arguments and the results of a body."""
        frame, naming = self.body(number), self.conversion.naming
        arguments = [labels(naming, frame, v) for v in frame.jaxpr.invars]
        return arguments, [labels(naming, frame, v) for v in frame.jaxpr.outvars]


Convert = Callable[[Site, list[Array]], list[Array]]


class Conversion:
    """Converts frames, by the names of their dims."""

    def __init__(self, naming: Naming, rules: Mapping[str, Convert]) -> None:
        self.naming = naming
        self._rules = rules

    def having(self, rules: Mapping[str, Convert]) -> Conversion:
        """Returns a conversion with other rules for some primitives."""
        return Conversion(self.naming, {**self._rules, **rules})

    def run(self, frame: Frame, operands: Sequence[Array]) -> list[Array]:
        """Returns the results of a jaxpr.

        Raises:
            ValueError: an equation has no translation; it has the primitive and the user's line.
        """
        known: dict[Any, Array] = {}

        def read(atom: Any) -> Array:
            if not isinstance(atom, jex.Literal):
                return known[atom]
            aval: Any = atom.aval
            return Array.filled(atom.val, aval.dtype, aval.shape)

        for variable, value in zip(frame.jaxpr.constvars, frame.consts, strict=True):
            known[variable] = self._constant(
                value, variable.aval, labels(self.naming, frame, variable)
            )
        for variable, array in zip(frame.jaxpr.invars, operands, strict=True):
            known[variable] = fit(array, labels(self.naming, frame, variable))
        for number, equation in enumerate(frame.jaxpr.eqns):
            site = Site(
                self,
                frame,
                number,
                equation,
                tuple(labels(self.naming, frame, atom) for atom in equation.invars),
                tuple(labels(self.naming, frame, atom) for atom in equation.outvars),
            )
            if _is_empty(equation):
                for variable in equation.outvars:
                    known[variable] = Array.filled(0, variable.aval.dtype, variable.aval.shape)
                continue
            inputs = [read(atom) for atom in equation.invars]
            with located(site.source):
                try:
                    results = self._rules[equation.primitive.name](site, inputs)
                except Unfit as error:
                    raise ValueError(
                        f"from_jax: `{site.name}`: {error}{site.source.at}; compute that part in "
                        "the language, with md.local around it where it has no operation"
                    ) from None
                for variable, array, names in zip(
                    equation.outvars, results, site.outputs, strict=True
                ):
                    known[variable] = fit(array, names)
        return [read(atom) for atom in frame.jaxpr.outvars]

    def _constant(self, value: Any, aval: Any, names: Sequence[str]) -> Array:
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(value))
            dims = [f"{n}" for n in names]
            return Array.of(literal(named(data, [*dims, KEY])), [KEY.name])
        data = np.asarray(value)
        if is_uniform(value):
            return Array.filled(data.flat[0] if data.size else 0, aval.dtype, aval.shape)
        return Array.of(literal(named(data, list(names))))


def _is_empty(equation: Any) -> bool:
    """Whether an equation computes arrays without elements only, as slices of nothing are."""
    return all(0 in getattr(v.aval, "shape", ()) for v in equation.outvars) and bool(
        equation.outvars
    )
