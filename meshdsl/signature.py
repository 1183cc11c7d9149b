"""Signatures: what a call of a compiled function looks like.

A `Signature` is what a program depends on: the tree of the arguments, and the dims and dtype of
every leaf. `Trees` is how the program is called with these arguments, so that a backend that knows
trees (JAX) can take and return them itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshdsl.dims import Shape
from meshdsl.dtypes import short
from meshdsl.module import path_of


@dataclass(frozen=True)
class Signature:
    """What a call looks like: the tree, and dims, dtype and path of every leaf."""

    tree: Any
    avals: tuple[tuple[Shape, np.dtype], ...]

    def check(self, given: Signature) -> None:
        """Raises ValueError, telling every leaf that differs, unless `given` is the same."""
        if given == self:
            return
        if given.tree != self.tree:
            raise ValueError(
                "the arguments have another structure than the traced ones:\n"
                f"  traced  {self.tree}\n  given   {given.tree}"
            )
        paths = paths_of(self.tree)
        problems = [
            f"  {path}: traced as {short(d)}{s}, given {short(e)}{t}"
            for path, (s, d), (t, e) in zip(paths, self.avals, given.avals, strict=True)
            if (s, d) != (t, e)
        ]
        raise ValueError("\n".join(["arguments differ from the traced ones:", *problems]))


@dataclass(frozen=True)
class Trees:
    """How leaves make the arguments of a call, and its results.

    Attributes:
        arguments: leaves -> the positional arguments.
        results: leaves -> what the call returns.
    """

    arguments: Callable[[Sequence[Any]], tuple]
    results: Callable[[Sequence[Any]], Any]

    @staticmethod
    def of(tree: Any, parameters: inspect.Signature, results: Any) -> Trees | None:
        """Returns how a function is called; None where it needs arguments by keyword.

        Args:
            tree: the structure of the arguments, by parameter.
            results: the structure of the results.
        """

        def call(leaves: Sequence[Any]) -> inspect.BoundArguments:
            bound = parameters.bind_partial()
            bound.arguments.update(jax.tree.unflatten(tree, leaves))
            return bound

        if call(range(tree.num_leaves)).kwargs:
            return None
        return Trees(lambda leaves: call(leaves).args, lambda leaves: results.unflatten(leaves))


def paths_of(tree: Any) -> list[str]:
    """Returns the path of every leaf of a structure: `["params/w", "batch/0"]`."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
