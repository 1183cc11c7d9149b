"""How elementwise operations are made, and how their dims broadcast by name.

The result has every dim of the operands: those of the operand with most dims first, then the rest
in order of appearance. One operand must have all of these dims: otherwise a misspelt name would
make an outer product. `outer` asks for one. Operations that differentiation adds are exempt.
Tensors of different dtypes do not mix (cast one of them); Python numbers take the dtype of the
tensors they meet.
"""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from meshdsl.ops.creation import as_tensor
from meshdsl.ops.elementwise.examples import EXAMPLES
from meshdsl.ops.operation import at_once, operation, reported_as
from meshdsl.ops.reductions.reduction import sum_to
from meshdsl.tensors.dims import Dimension, Shape, did_you_mean
from meshdsl.tensors.dtypes import in_words, need_kind, short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Form, Operation, Primitive, Work
from meshdsl.tracing.trace import bind_one, is_derived

Unary = Callable[[Any], Tensor]
Binary = Callable[[Any, Any], Tensor]
Slope = Callable[..., Tensor]  # (cotangent, output, *inputs) -> the cotangent of one input
Result = Callable[[np.dtype], np.dtype]  # dtype of the operands -> dtype of the result

ELEMENTWISE: dict[str, Primitive] = {}  # by name, in the order in which they are defined
_MODULES: dict[str, ModuleType | None] = {}  # by name, where they are defined


def broadcast_shape(inputs: Sequence[Tensor]) -> Shape:
    """Returns the dims of the operands together.

    Raises:
        ValueError: one name has two sizes; each clash names both tensors and where they were made.
    """
    common = _common_shape(inputs)
    if common is not None:
        return common
    ordered = sorted(inputs, key=lambda t: -len(t.shape))
    owner: dict[str, Tensor] = {}
    dims: dict[str, Dimension] = {}
    problems = []
    for tensor in ordered:
        for dim in tensor.shape:
            have = dims.setdefault(dim.name, dim)
            other = owner.setdefault(dim.name, tensor)
            if have.size != dim.size:
                problems.append(
                    f"dim `{dim.name}` has size {have.size} in {other} (made at {other.source}) "
                    f"but {dim.size} in {tensor} (made at {tensor.source})"
                )
    if problems:
        raise ValueError("; ".join(problems))
    return Shape(dims.values())


def _common_shape(inputs: Sequence[Tensor]) -> Shape | None:
    """Returns the dims of all operands but scalars; None if they differ."""
    common = inputs[0].shape
    for tensor in inputs:
        shape = tensor.shape
        if shape is common or not shape or shape == common:
            continue
        if common:
            return None
        common = shape
    return common


class _Allowed(threading.local):
    """The names of the dims along which `outer` is in use, in this thread."""

    def __init__(self) -> None:
        self.outer: frozenset[str] = frozenset()


_allowed = _Allowed()


@at_once
def outer(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns an elementwise function of every combination of the operands' elements.

    `md.outer(md.subtract, md.arange(length), md.arange(memory))` is [length, memory].

    Dims of one name still pair up, but no operand needs to have all dims of the result.

    Args:
        function: of the operands: an elementwise operation such as `md.less` or `md.where`, or a
            lambda of several of them. Other tensors that it uses have no dims but theirs.

    Raises:
        ValueError: `function` is no function of meshdsl, or uses a tensor with other dims.

    Examples:
        >>> query, key = md.named([1.0, 2.0], ["length"]), md.named([10.0, 20.0], ["memory"])
        >>> print(md.outer(md.multiply, query, key))
        f32[length=2, memory=2] [[10. 20.]
         [20. 40.]]
        >>> print(md.outer(lambda x, y: md.abs(x - y), query, key))
        f32[length=2, memory=2] [[ 9. 19.]
         [ 8. 18.]]
    """
    with reported_as("outer", operands):
        _need_function(function)
    leaves = jax.tree.leaves(operands, is_leaf=lambda x: hasattr(x, "dims"))
    names = {dim.name for x in leaves for dim in getattr(x, "dims", ())}
    before, _allowed.outer = _allowed.outer, _allowed.outer | names
    try:
        return function(*operands)
    finally:
        _allowed.outer = before


def _need_function(function: Any) -> None:
    if isinstance(function, np.ufunc):
        raise ValueError(
            f"np.{function.__name__} pairs elements by position; give md's function, as in "
            "md.outer(md.add, x, y)"
        )
    if not callable(function):
        raise ValueError(
            f"the first argument is a function, as in md.outer(md.add, x, y), not {function!r}"
        )


def bind_elementwise(primitive: Primitive, operands: Sequence[Tensor]) -> Tensor:
    """Adds an elementwise operation with operands that the user chose.

    Raises:
        ValueError: no operand has the dims of all, outside of `outer`.
    """
    if _common_shape(operands) is None:
        shapes = [tensor.shape for tensor in operands]
        largest = max(shapes, key=len)
        names = set(largest.names)
        apart = not all(names.issuperset(shape.names) for shape in shapes)
        if apart and not is_derived():
            every = names.union(*(shape.names for shape in shapes))
            if not every <= _allowed.outer:
                raise ValueError(_unlike(operands, largest, primitive.word or primitive.name))
    return bind_one(primitive, operands)


def need_dims(tensor: Tensor, what: str, whole: Tensor, other: str, advice: str) -> None:
    """Raises ValueError if a tensor has dims that the other tensor lacks.

    `need_dims(segments, "the segments", x, "x", "broadcast x first")`.
    """
    names = [name for name in whole.shape.names if name not in tensor.shape.names]
    extra = tensor.shape.without(whole.shape.names)
    if extra:
        hints = {dim.name: did_you_mean(dim.name, names) for dim in extra}
        hint = "".join(text.replace("?", f" instead of `{n}`?") for n, text in hints.items())
        lacking = ", ".join(f"`{dim.name}`" for dim in extra)
        verb = "have" if what.endswith("s") else "has"
        raise ValueError(
            f"{what} {tensor} {verb} {lacking}, which "
            f"{other} {whole} lacks{hint or '.'} If it is meant, {advice}"
        )


def _unlike(operands: Sequence[Tensor], largest: Shape, word: str) -> str:
    """Returns the message for operands of which none has the dims of all."""
    every = dict.fromkeys(name for tensor in operands for name in tensor.shape.names)
    lacks = [
        f"{tensor} lacks {', '.join(f'`{name}`' for name in missing)}"
        for tensor in operands
        if tensor.shape and (missing := [n for n in every if n not in tensor.shape.names])
    ]
    hints = ""
    for name in (name for name in every if name not in largest.names):
        apart = [t.shape.names for t in operands if name in t.shape.names]
        hint = did_you_mean(name, [n for n in largest.names if not any(n in a for a in apart)])
        hints += hint.replace("?", f" instead of `{name}`?")
    letters = ", ".join("xyz"[: len(operands)]) if word != "where" else "condition, x, y"
    end = "" if hints else "."
    if _allowed.outer:
        strange = ", ".join(f"`{name}`" for name in every if name not in _allowed.outer)
        return (
            f"md.outer makes combinations of its own operands, of which none has {strange}: "
            f"{'; '.join(lacks)}{hints}{end} Give what has it to md.outer as one more operand"
        )
    return (
        f"one operand must have the dims of all: {'; '.join(lacks)}{hints}{end} If an outer "
        f"product is meant, say so: md.outer(md.{word}, {letters})"
    )


def as_bool(dtype: np.dtype) -> np.dtype:
    """The dtype of a comparison's result."""
    return np.dtype("bool")


def elementwise(
    name: str,
    slopes: Sequence[Slope | None],
    accepts: str,
    result: Result | None = None,
    **facts: Any,
) -> Primitive:
    """Makes an elementwise primitive.

    Args:
        slopes: one gradient rule per operand, None where the slope is zero.
        accepts: kinds of dtype it takes: b(ool), i(nteger), f(loating-point), c(omplex).
        result: dtype of the result from that of the operands; by default the same.
        facts: further facts of `Primitive`: work, linear, additive, symbol, word.
    """

    def rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
        alike = inputs[-2:] if name == "select" else inputs
        dtype = alike[-1].dtype
        for tensor in alike:
            if tensor.dtype is not dtype and tensor.dtype != dtype:
                raise ValueError(
                    f"dtypes differ: {', '.join(short(t.dtype) for t in alike)}; "
                    f"cast one, as in md.cast(x, {dtype.name!r})"
                )
        need_kind(dtype, accepts)
        return [(broadcast_shape(inputs), result(dtype) if result else dtype)]

    def gradient(
        op: Operation, cotangents: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        (cotangent,) = cotangents
        return [
            sum_to(slope(cotangent, op.outputs[0], *op.inputs), tensor.shape)
            if want and slope is not None
            else None
            for slope, want, tensor in zip(slopes, wanted, op.inputs, strict=True)
        ]

    facts.update(flat=not any(slopes), form=Form.ELEMENTWISE, positionwise=True)
    rule.__module__ = _defining_module()
    primitive = Primitive(name, rule, gradient, **facts)
    add_elementwise(primitive)
    return primitive


def _defining_module() -> str:
    """Returns the name of the module whose statement defines an operation."""
    frame = sys._getframe()
    while frame.f_globals is globals() and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def add_elementwise(primitive: Primitive) -> None:
    """Adds an elementwise primitive to `ELEMENTWISE`.

    Raises:
        ValueError: it has another one of that name; the message names both files.
    """
    name, module = primitive.name, primitive.rule.__module__
    before = _MODULES.get(name)
    # A module whose import has failed is no longer there, and may be imported again.
    if name in ELEMENTWISE and before and sys.modules.get(before.__name__) is before:
        files = [each.replace(".", "/") + ".py" for each in (before.__name__, module)]
        raise ValueError(
            f"elementwise operation `{name}` is defined twice, in {' and in '.join(files)}: give "
            "one of them another name"
        )
    ELEMENTWISE[name] = primitive
    _MODULES[name] = sys.modules.get(module)


def unary(
    name: str,
    slope: Slope | None,
    accepts: str,
    doc: str,
    *,
    work: Work = Work.FUNCTION,
    **facts: Any,
) -> Unary:
    """Makes an elementwise operation of one operand, as `elementwise` makes its primitive."""
    primitive = elementwise(name, [slope], accepts, work=work, **facts)

    def function(x: Any) -> Tensor:
        return bind_one(primitive, (as_tensor(x),))

    return _public(function, name, doc, f"x is not {in_words(accepts)}.")


def binary(
    name: str,
    slopes: Sequence[Slope | None],
    accepts: str,
    doc: str,
    *,
    work: Work = Work.STEP,
    **facts: Any,
) -> Binary:
    """Makes an elementwise operation of two operands, as `elementwise` makes its primitive."""
    primitive = elementwise(name, slopes, accepts, work=work, **facts)

    def function(x: Any, y: Any) -> Tensor:
        if isinstance(x, Tensor):
            return bind_elementwise(primitive, (x, as_tensor(y, x.dtype)))
        if isinstance(y, Tensor):
            return bind_elementwise(primitive, (as_tensor(x, y.dtype), y))
        left = as_tensor(x)
        return bind_elementwise(primitive, (left, as_tensor(y, left.dtype)))

    problem = (
        f"x or y is not {in_words(accepts)}; or their\n        dtypes differ, a dim has two sizes, "
        "or neither has the dims of both."
    )
    return _public(function, name, doc, problem)


def _public(function: Callable, name: str, doc: str, problem: str) -> Callable[..., Tensor]:
    """Makes a public operation of a function: its docstring has its errors and its example."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{doc}\n\nRaises:\n    ValueError: {problem}\n"
    if name in EXAMPLES:
        function.__doc__ += f"\nExamples:\n{textwrap.indent(EXAMPLES[name], '    ')}\n"
    return operation(function)
