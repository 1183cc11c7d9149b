"""Programs of JAX as programs of named tensors, for optax's optimizers.

A jaxpr has positions where this language has names. An `Array` here is a tensor with a name for
each position, or None where all elements along it are the same (as in `jnp.zeros`): the tensor
lacks that dim. Equations whose result is the same on every layout are translated: elementwise ones,
reductions, broadcasts, transpositions, calls and conditions.

Invariant: nothing is guessed. Positions that pair up must have one name. An equation that is not
listed here, or whose dims do not fit, is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import numpy as np

import meshdsl.ops as ops
from meshdsl.imports.jax.functions import FUNCTIONS, integer_power
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor


class Refused(ValueError):
    """An equation has no translation."""


@dataclass(frozen=True)
class Array:
    """A tensor that stands for an array, with the name of each position of the array.

    Attributes:
        axes: the name of the tensor's dim at each position; None where all elements are the same.
        sizes: of all positions.
    """

    tensor: Tensor
    axes: tuple[str | None, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Array:
        """Returns a tensor, its dims in their order."""
        return Array(tensor, tensor.shape.names, tensor.shape.sizes)

    def settled(self, shape: Shape) -> Tensor:
        """Returns the tensor, which must have just these dims, in this order.

        Raises:
            Refused: it has others.
        """
        for mine, dim in zip(self.axes, shape, strict=True):
            if mine not in (None, dim.name):
                raise Refused(f"dim `{mine}` stands where `{dim.name}` stood before")
        full = self.tensor if len(self.tensor.shape) == len(shape) else None
        return (ops.broadcast(self.tensor, shape) if full is None else full).transpose(shape.names)


def run(program: jex.ClosedJaxpr, arguments: Sequence[Array]) -> list[Array]:
    """Returns the results of a closed jaxpr for some arguments.

    Raises:
        Refused: equations have no translation; it lists the names of all unknown ones.
    """
    if unknown := sorted(set(_unknown(program.jaxpr))):
        raise Refused(f"no translation of {', '.join(f'`{name}`' for name in unknown)}")
    return _run(program.jaxpr, program.consts, arguments)


def _run(jaxpr: jex.Jaxpr, consts: Sequence[Any], arguments: Sequence[Array]) -> list[Array]:
    known: dict[Any, Array] = {}

    def read(atom: Any) -> Array:
        return _constant(atom.val, atom.aval) if isinstance(atom, jex.Literal) else known[atom]

    for variable, value in zip(jaxpr.constvars, consts, strict=True):
        known[variable] = _constant(value, variable.aval)
    known.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = [read(atom) for atom in equation.invars]
        try:
            results = _RULES[name](operands, equation.params)
        except Refused as error:
            raise Refused(f"`{name}`: {error}") from error
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _unknown(jaxpr: jex.Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name not in _RULES:
            yield equation.primitive.name
        for inner in _bodies(equation.params):
            yield from _unknown(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


def _bodies(params: Mapping[str, Any]) -> list[Any]:
    """Returns the jaxprs of a call or a condition."""
    if "branches" in params:
        return list(params["branches"])
    return [params[name] for name in ("jaxpr", "call_jaxpr") if name in params]


def _constant(value: Any, aval: Any) -> Array:
    array = np.asarray(value)
    if array.size > 1 and (array != array.flat[0]).any():
        raise Refused(f"a constant of shape {list(array.shape)} whose dims have no names")
    number = array.flat[0].item() if array.size else 0
    return Array(ops.full([], number, aval.dtype), (None,) * array.ndim, array.shape)


# Elementwise.


def _aligned(arrays: Sequence[Array]) -> tuple[list[Tensor], tuple[str | None, ...], Any]:
    """Returns tensors that each have all dims or none, and the positions of their result."""
    rank = max(len(array.sizes) for array in arrays)
    full = [array for array in arrays if len(array.sizes) == rank]
    sizes = tuple(max(each) for each in zip(*(array.sizes for array in full), strict=True))
    arrays = [_repeated(a, sizes) if len(a.sizes) == rank else a for a in arrays]
    full = [array for array in arrays if len(array.sizes) == rank]
    axes: list[str | None] = []
    for names in zip(*(array.axes for array in full), strict=True):
        met = dict.fromkeys(name for name in names if name is not None)
        if len(met) > 1:
            raise Refused(f"it brings dims {' and '.join(f'`{name}`' for name in met)} together")
        axes.append(next(iter(met), None))
    named = [name for name in axes if name is not None]
    if len(set(named)) < len(named):
        raise Refused("one dim stands at two positions")
    shape = Shape(Dimension(n, s) for n, s in zip(axes, sizes, strict=True) if n is not None)
    tensors = [
        a.tensor if len(a.tensor.shape) in (0, len(shape)) else ops.broadcast(a.tensor, shape)
        for a in arrays
    ]
    return tensors, tuple(axes), sizes


def _elementwise(function: Callable[..., Tensor]) -> Callable:
    def rule(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        tensors, axes, sizes = _aligned(operands)
        return [Array(function(*tensors), axes, sizes)]

    return rule


def _power(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    (x,) = operands
    if params["y"] == 0:
        return [Array(ops.ones([], x.tensor.dtype), (None,) * len(x.sizes), x.sizes)]
    return [Array(integer_power(x.tensor, params["y"]), x.axes, x.sizes)]


def _converted(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    (x,) = operands
    dtype = np.dtype(params["new_dtype"])
    tensor = x.tensor != 0 if dtype == np.bool_ else ops.cast(x.tensor, dtype)
    return [Array(tensor, x.axes, x.sizes)]


# Positions.


def _repeated(x: Array, sizes: tuple[int, ...]) -> Array:
    """Returns an array repeated to these sizes; where they differ, it has size one."""
    tensor, axes = x.tensor, list(x.axes)
    for place, (name, size) in enumerate(zip(x.axes, x.sizes, strict=True)):
        if size != sizes[place]:
            tensor = tensor if name is None else ops.index(tensor, name, 0)
            axes[place] = None
    return Array(tensor, tuple(axes), sizes)


def _broadcast(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    x, sizes = operands[0], tuple(params["shape"])
    places = params["broadcast_dimensions"]
    x = _repeated(x, tuple(sizes[place] for place in places))
    axes: list[str | None] = [None] * len(sizes)
    for name, place in zip(x.axes, places, strict=True):
        axes[place] = name
    return [Array(x.tensor, tuple(axes), sizes)]


def _reshaped(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    """Adds and drops positions of size one."""
    x, sizes = operands[0], tuple(params["new_sizes"])
    if params.get("dimensions") is not None or [s for s in x.sizes if s != 1] != [
        s for s in sizes if s != 1
    ]:
        if all(name is None for name in x.axes):
            return [Array(x.tensor, (None,) * len(sizes), sizes)]
        raise Refused(f"from {list(x.sizes)} to {list(sizes)}, which merges or splits dims")
    tensor, names = x.tensor, []
    for name, size in zip(x.axes, x.sizes, strict=True):
        if size == 1 and name is not None:
            tensor = ops.index(tensor, name, 0)
        elif size != 1:
            names.append(name)
    left = iter(names)
    return [Array(tensor, tuple(None if s == 1 else next(left) for s in sizes), sizes)]


def _squeezed(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    x, gone = operands[0], set(params["dimensions"])
    sizes = tuple(size for place, size in enumerate(x.sizes) if place not in gone)
    tensor = x.tensor
    for place in gone:
        if (name := x.axes[place]) is not None:
            tensor = ops.index(tensor, name, 0)
    axes = tuple(name for place, name in enumerate(x.axes) if place not in gone)
    return [Array(tensor, axes, sizes)]


def _transposed(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    x, order = operands[0], params["permutation"]
    return [Array(x.tensor, tuple(x.axes[i] for i in order), tuple(x.sizes[i] for i in order))]


def _joined(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    """Joins numbers in a row, such as the norms of all parameters, along a new dim."""
    if any(array.sizes != (1,) or array.axes != (None,) for array in operands):
        raise Refused("of more than single numbers")
    row = Dimension("_row", len(operands))
    return [Array(ops.stack([array.tensor for array in operands], row), (row.name,), (row.size,))]


# Reductions.


def _reduced(function: Callable[..., Tensor], repeats: bool = False) -> Callable:
    """Returns the rule of a reduction.

    Args:
        repeats: whether each of several equal elements counts, as in a sum.
    """

    def rule(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, over = operands[0], set(params["axes"])
        names = [x.axes[place] for place in sorted(over) if x.axes[place] is not None]
        tensor = function(x.tensor, names) if names else x.tensor
        alike = math.prod(x.sizes[place] for place in over if x.axes[place] is None)
        if repeats and alike != 1:
            tensor = tensor * alike
        remaining = [place for place in range(len(x.sizes)) if place not in over]
        return [
            Array(tensor, tuple(x.axes[i] for i in remaining), tuple(x.sizes[i] for i in remaining))
        ]

    return rule


def _product(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    """Computes an inner product over all positions, as norms need."""
    (ours, theirs), batch = params["dimension_numbers"]
    x, _ = operands
    if any(batch) or len(ours) != len(x.sizes) or tuple(ours) != tuple(theirs):
        raise Refused("of matrices, in which a dim would have two names")
    (multiplied,) = _elementwise(ops.multiply)(operands, {})
    return _reduced(ops.sum, repeats=True)([multiplied], {"axes": range(len(x.sizes))})


# Calls.


def _called(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    (body,) = _bodies(params)
    if isinstance(body, jex.ClosedJaxpr):
        return _run(body.jaxpr, body.consts, operands)
    return _run(body, (), operands)


def _condition(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    """Computes all branches, which have no effects, and selects."""
    which, *rest = operands
    results = [_run(branch.jaxpr, branch.consts, rest) for branch in params["branches"]]
    chosen = results[0]
    for number, branch in enumerate(results[1:], 1):
        test = which.tensor
        later = Array(test if test.dtype == bool else test >= number, (), ())
        pairs = zip(chosen, branch, strict=True)
        chosen = [_elementwise(ops.where)([later, b, a], {})[0] for a, b in pairs]
    return chosen


def _same(operands: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
    return list(operands)


_RULES: Mapping[str, Callable[[Sequence[Array], Mapping[str, Any]], list[Array]]] = {
    **{name: _elementwise(function) for name, function in FUNCTIONS.items()},
    "broadcast_in_dim": _broadcast,
    "checkpoint": _called,
    "closed_call": _called,
    "cond": _condition,
    "concatenate": _joined,
    "convert_element_type": _converted,
    "copy": _same,
    "copy_p": _same,
    "core_call": _called,
    "custom_jvp_call": _called,
    "custom_vjp_call": _called,
    "dot_general": _product,
    "integer_pow": _power,
    "jit": _called,
    "optimization_barrier": _same,
    "pjit": _called,
    "reduce_and": _reduced(ops.all),
    "reduce_max": _reduced(ops.max),
    "reduce_min": _reduced(ops.min),
    "reduce_or": _reduced(ops.any),
    "reduce_sum": _reduced(ops.sum, repeats=True),
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "stop_gradient": _same,
    "transpose": _transposed,
}
