"""Checks of hyperparameters, and of what optimizers are given; all problems are in one error.

Hyperparameters are numbers in intervals. Gradients and states are trees like the parameters, whose
leaves are tensors.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import meshdsl.ops as ops
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import is_tracing

RATE = "[0, inf)"  # the interval of learning rates
_LISTED = 5  # how many leaves an error lists


def out_of_range(within: Mapping[str, tuple[Any, str]]) -> list[str]:
    """Returns one text per value that is no number, not finite or outside of its interval.

    Args:
        within: `{"b1": (value, "[0, 1)")}`; bounds are read from the interval.
    """
    problems = []
    for name, (value, interval) in within.items():
        low, high = (float(bound) for bound in interval[1:-1].split(","))
        fits = False
        if is_number(value) and math.isfinite(value):
            above = value >= low if interval[0] == "[" else value > low
            below = value <= high if interval[-1] == "]" else value < high
            fits = above and below
        if not fits:
            problems.append(f"{name} must be in {interval}, got {value!r}")
    return problems


def check_ranges(name: str, within: Mapping[str, tuple[Any, str]], *more: str) -> None:
    """Checks hyperparameters; see `out_of_range`.

    Args:
        name: the owner of the hyperparameters, for the error.
        more: problems from other checks; empty texts do not count.

    Raises:
        ValueError: lists all values that do not fit, and the problems in `more`.
    """
    problems = [*out_of_range(within), *filter(None, more)]
    if problems:
        raise ValueError(f"{name}: {'; '.join(problems)}")


def bad_rate(value: Any, name: str = "learning_rate") -> str:
    """Returns the problem with a learning rate (a number or a schedule), or ""."""
    if callable(value):
        return ""
    (problem,) = out_of_range({name: (value, RATE)}) or [""]
    return problem.replace(f"in {RATE}", f"a number in {RATE} or a schedule")


def bad_mask(value: Any, name: str = "mask") -> str:
    """Returns the problem with a mask, or ""."""
    return "" if callable(value) else f"{name} must be a function of path and shape, got {value!r}"


def is_number(value: Any) -> bool:
    """Whether a value is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_step(step: Any) -> Tensor:
    """Returns the number of a step as a tensor, s32[] for a Python number.

    Outside of a trace a number becomes an array, so that one program serves all steps. There it
    may be a value that JAX traces, too.

    Raises:
        ValueError: it is no whole number of 32 bits, or JAX traces it, but `md.jit` does, too.
    """
    if isinstance(step, Tensor):
        return step
    if isinstance(step, jax.core.Tracer):
        return _of_jax(step)
    number = step.item() if getattr(step, "shape", None) == () else step  # of numpy or JAX
    if not is_whole(number):
        kind = type(step).__name__
        what = f"{kind} {number}" if isinstance(number, float) else kind
        raise ValueError(
            "step is the number of steps before this one, a whole number or a tensor s32[], "
            f"not {what}"
        )
    bounds = np.iinfo("int32")
    if not bounds.min <= number <= bounds.max:
        raise ValueError(f"step is a number of 32 bits, at most {bounds.max}, not {number}")
    if is_tracing():
        return ops.full([], int(number), "int32")
    return NamedArray(np.array(number, "int32"), Shape())


def _of_jax(step: Any) -> Tensor:
    form = f"{short(np.dtype(step.dtype))}{[*step.shape]}"
    if step.shape or not np.issubdtype(step.dtype, np.integer):
        raise ValueError(f"step is the number of steps before this one, s32[], not {form} of JAX")
    if is_tracing():
        raise ValueError(
            f"step is {form} that JAX traces outside of the function that md.jit traces: make it "
            "an argument of that function"
        )
    return NamedArray(step.astype("int32"), Shape())


def need_tensors(name: str, tree: Any) -> None:
    """Raises ValueError unless all leaves of a tree are tensors; it lists those that are not.

    Args:
        name: of the tree, as the start of paths.
    """
    problems = []
    for path, leaf in _leaves(name, tree).items():
        if leaf is None or isinstance(leaf, Tensor):
            continue
        shape = getattr(leaf, "shape", None)
        problems.append(f"{path} is {type(leaf).__name__}{'' if shape is None else [*shape]}")
    if problems:
        raise ValueError(
            f"{_some(problems)}, not a tensor: name the dims of arrays, as in "
            "md.named(array, dims); numbers have none, as in md.named(0.5, [])"
        )


def need_alike(params: Any, name: str, tree: Any) -> None:
    """Raises ValueError unless a tree has the structure of the parameters, or None in its place.

    Its leaves have dims of the parameters, all or some: an operation repeats them along the others.

    Args:
        name: of the tree, as the start of paths.
    """
    need_tensors(name, tree)
    ours, theirs = _leaves("params", params), _leaves(name, tree)
    own = {path.removeprefix("params"): leaf for path, leaf in ours.items()}
    other = {path.removeprefix(name): leaf for path, leaf in theirs.items()}
    problems = [f"{name}{path} is missing" for path in own if path not in other]
    problems += [f"there is no params{path} for {name}{path}" for path in other if path not in own]
    for path in own.keys() & other.keys():
        p, leaf = own[path], other[path]
        if leaf is None:
            continue
        if p is None:
            problems.append(f"there is no params{path} for {name}{path}")
            continue
        if not set(leaf.dims) <= set(p.dims):
            problems.append(f"{name}{path} is {_form(leaf)}, but params{path} is {_form(p)}")
    if not problems:
        wanted: Any = jax.tree.structure(params, is_leaf=_is_end)
        found = jax.tree.structure(tree, is_leaf=_is_end)
        if wanted != found:
            problems.append(f"{name} is {found}, but params is {wanted}")
    if problems:
        raise ValueError(f"{_some(sorted(problems))}; {name} is a tree like params")


def _leaves(name: str, tree: Any) -> dict[str, Any]:
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_end)
    return {path_of(keys, name): leaf for keys, leaf in keyed}


def _is_end(value: Any) -> bool:
    return value is None or isinstance(value, Tensor)


def _form(tensor: Tensor) -> str:
    return f"{short(tensor.dtype)}{tensor.dims}"


def _some(problems: Sequence[str]) -> str:
    more = len(problems) - _LISTED
    return "; ".join(problems[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
