"""Signatures: the structure, dims and dtypes of a call of a compiled function.

A `Signature` is what a program depends on: the tree of the arguments, and the dims and dtype of
every leaf. `taking_leaves` checks plain arrays against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.tensors.dims import Shape, did_you_mean
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.module import path_of


@dataclass(frozen=True)
class Signature:
    """The form of a call: the tree, and dims, dtype and path of every leaf."""

    tree: Any
    avals: tuple[tuple[Shape, np.dtype], ...]

    def check(self, given: Signature) -> None:
        """Raises ValueError that lists every leaf that differs, unless `given` is the same."""
        if given == self:
            return
        if given.tree != self.tree:
            differences = _differences(self.tree, given.tree)
            raise ValueError(
                "\n".join(
                    ["the arguments have another structure than the traced ones:", *differences]
                )
            )
        paths = paths_of(self.tree)
        problems = [
            f"  {path}: traced as {short(d)}{s}, given {short(e)}{t}"
            for path, (s, d), (t, e) in zip(paths, self.avals, given.avals, strict=True)
            if (s, d) != (t, e)
        ]
        raise ValueError("\n".join(["arguments differ from the traced ones:", *problems]))


def taking_leaves(
    run: Callable, name: str, paths: Sequence[str], avals: Sequence[tuple[Shape, np.dtype]]
) -> Callable:
    """Returns a function of arrays that checks them: `taking_leaves(run, "loss", ["x"], avals)`.

    Python's numbers stand for tensors without dims.

    Args:
        run: takes JAX arrays, one per leaf.
        paths, avals: the path, the dims and the dtype of each leaf.
    """

    def checked(*leaves: Any, **named: Any) -> Any:
        if named:
            raise TypeError(
                f"{name}.as_jax got an unexpected keyword {', '.join(f'`{n}`' for n in named)}: it "
                f"takes arrays by position, the leaves in order: {', '.join(paths) or 'none'}"
            )
        if len(leaves) != len(paths):
            wanted = ", ".join(
                f"{p}: {short(d)}{s}" for p, (s, d) in zip(paths, avals, strict=True)
            )
            raise ValueError(
                f"{name}.as_jax takes {len(paths)} arrays, the leaves of the arguments in order, "
                f"but was called with {len(leaves)}: {wanted or 'none'}. Give the leaves of trees, "
                "as in g(*[x.unpadded() for x in leaves])"
            )
        numbers = [_number(*pair) for pair in zip(leaves, avals, strict=True)]
        rows = list(zip(paths, avals, numbers, strict=True))
        problems = [f"  {path}: {bad}" for path, aval, x in rows if (bad := _misfit(x, *aval))]
        if problems:
            raise ValueError(
                "\n".join([f"{name}.as_jax: arrays differ from the traced arguments:", *problems])
            )
        return run(*numbers)

    return checked


def _number(leaf: Any, aval: tuple[Shape, np.dtype]) -> Any:
    """Returns a plain number as an array, of the traced dtype where it has none of its own."""
    shape, dtype = aval
    weak = isinstance(leaf, bool | int | float | complex)
    weak = weak or (isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type)
    if not weak or shape or np.shape(leaf):
        return leaf
    own = jnp.result_type(leaf)
    fits = any(
        jnp.issubdtype(own, kind) and jnp.issubdtype(dtype, into)
        for kind, into in ((jnp.integer, jnp.number), (jnp.floating, jnp.inexact))
    )
    return jnp.asarray(leaf, dtype) if fits or own.kind == dtype.kind else leaf


def _misfit(leaf: Any, shape: Shape, dtype: np.dtype) -> str:
    """Returns an array's dims and dtype as text if they are not the traced ones."""
    wanted = f"traced as {short(dtype)}{shape}"
    if isinstance(leaf, bool | int | float | complex):
        kind = type(leaf).__name__
        return f"{wanted}, given {'an' if kind == 'int' else 'a'} {kind}"
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return f"{wanted}, given a {type(leaf).__name__}; give the leaves of trees, each an array"
    if isinstance(leaf.shape, Shape):
        return f"{wanted}, given {leaf!r}; give its data, as in x.unpadded()"
    if tuple(leaf.shape) == shape.sizes and leaf.dtype == dtype:
        return ""
    sizes = ", ".join(map(str, leaf.shape))
    if len(leaf.shape) == len(shape):
        rows = zip(shape, leaf.shape, strict=True)
        sizes = ", ".join(f"{dim.name}={size}" for dim, size in rows)
    return f"{wanted}, given {leaf.dtype}[{sizes}]"


def _differences(traced: Any, given: Any) -> list[str]:
    """Returns a line per leaf that only one of two structures has, else the lines of `_nodes`."""
    had, has = paths_of(traced), paths_of(given)
    lines = [f"  {path}: missing" for path in had if path not in has]
    absent = [path for path in had if path not in has]
    lines += [
        f"  {path}: not expected{did_you_mean(path, absent)}" for path in has if path not in had
    ]
    return lines or [f"  {line}" for line in _nodes(traced, given)]


def _nodes(traced: Any, given: Any) -> list[str]:
    """Returns how nodes differ whose leaves have the same paths: in kind, or in static fields."""
    had, has = traced.node_data(), given.node_data()
    if had != has:
        kinds = ["an array" if data is None else data[0].__name__ for data in (had, has)]
        if kinds[0] != kinds[1]:
            return [f"traced with {kinds[0]}, given {kinds[1]}"]
        return [f"{kinds[0]}: traced with the static fields {had[1]}, given {has[1]}"]
    mine, others = traced.children(), given.children()
    if len(mine) != len(others):
        return [f"{had[0].__name__}: traced with {len(mine)} parts, given {len(others)}"]
    return [line for pair in zip(mine, others, strict=True) for line in _nodes(*pair)]


def paths_of(tree: Any) -> list[str]:
    """Returns the path of every leaf of a structure: `["params/w", "batch/0"]`."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
