"""Numpy's functions on NamedArrays: they never pair elements of unlike dims by position.

A function of one NamedArray, or of several with the same dims in the same order, runs on their data
as on arrays of numpy. Where the dims differ, a ufunc runs the operation of that meaning, which
pairs by name, as in a traced function. Other functions are refused.

Python's operators with an array of numpy on the left arrive here as ufuncs, and look like a call.
Both run the operator of tensors, which takes numbers and refuses arrays without names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.tensors.idioms import by_name, refuse

if TYPE_CHECKING:
    from meshdsl.tensors.named_array import NamedArray

# Ufuncs that are operators of Python.
_OPERATORS = frozenset(
    "add subtract multiply divide true_divide floor_divide remainder divmod power equal not_equal "
    "less less_equal greater greater_equal bitwise_and bitwise_or bitwise_xor left_shift "
    "right_shift matmul".split()
)
# Functions that treat each argument by itself, or have letters that say what pairs up.
_ONE_BY_ONE = frozenset(
    "savez savez_compressed result_type can_cast common_type shares_memory may_share_memory "
    "isin meshgrid outer einsum".split()
)
_ADVICE = {
    "where": "write md.where(mask, x, y)",
    "dot": "write md.einsum(x, y, over='dim')",
    "vdot": "write md.einsum(x, y, over='dim')",
    "inner": "write md.einsum(x, y, over='dim')",
    "tensordot": "write md.einsum(x, y, over='dim')",
    "concatenate": "write md.concat([x, y], 'dim')",
    "stack": "write md.stack([x, y], dim)",
    "clip": "write md.clip(x, low, high)",
}


def ufunc(function: Any, method: str, inputs: tuple, kwargs: dict) -> Any:
    """Returns the result of a ufunc of numpy on NamedArrays; see the module.

    Raises:
        ValueError: dims differ, and no operation has the ufunc's meaning.
    """
    if any(_is_named(value) for value in kwargs.get("out", ())):
        refuse(f"tensors never change: np.{function.__name__} cannot write into one by out=")
    if _has_traced(inputs):
        return by_name(function, method, inputs, kwargs)
    if method == "__call__" and function.__name__ in _OPERATORS and _is_operator(inputs, kwargs):
        left = inputs[0][()]  # comparisons give numbers of numpy as arrays without dims
        return by_name(function, method, (left, inputs[1]), {})
    if _alike((inputs, kwargs)):
        call = getattr(function, method)
        return call(*_data(inputs), **_data(kwargs))
    return by_name(function, method, inputs, kwargs, "arrays whose dims differ")


def function(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Returns the result of another function of numpy on NamedArrays; see the module.

    Raises:
        ValueError: the arguments have different dims, or include traced tensors.
    """
    name = function.__name__
    if _has_traced((args, kwargs)):
        refuse(f"np.{name} does not know traced tensors: see md's operations")
    if not _alike((args, kwargs)) and name not in _ONE_BY_ONE:
        shapes = " and ".join(dict.fromkeys(str(array.dims) for array in _named((args, kwargs))))
        refuse(
            f"np.{name} pairs elements by position, but the dims are {shapes}: "
            f"{_ADVICE.get(name, 'see md for operations by name')}, or give the arrays one order "
            "of dims first, as in y.transpose(x.dims); where positions are meant, np.asarray(x)"
        )
    return function(*_data(args), **_data(kwargs))


def _is_operator(inputs: tuple, kwargs: dict) -> bool:
    """Whether a call comes from `array + x` or `array += x`."""
    if len(inputs) != 2 or not isinstance(inputs[0], np.ndarray | np.generic):
        return False
    return not kwargs or (set(kwargs) == {"out"} and kwargs["out"][0] is inputs[0])


def _is_named(value: Any) -> bool:
    from meshdsl.tensors.named_array import NamedArray  # this module implements its protocols

    return isinstance(value, NamedArray)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _named(value: Any) -> list[NamedArray]:
    return [leaf for leaf in _leaves(value) if _is_named(leaf)]


def _has_traced(value: Any) -> bool:
    from meshdsl.tracing.graph import TracedTensor  # it imports these functions

    return any(isinstance(leaf, TracedTensor) for leaf in _leaves(value))


def _alike(value: Any) -> bool:
    """Whether all NamedArrays with dims have the same ones in the same order."""
    return len({array.dims for array in _named(value) if array.dims}) <= 1


def _data(value: Any) -> Any:
    """Returns arguments with the NamedArrays as arrays of numpy."""
    if _is_named(value):
        return np.asarray(value)
    if type(value) in (list, tuple):
        return type(value)(map(_data, value))
    if type(value) is dict:
        return {name: _data(item) for name, item in value.items()}
    return value
