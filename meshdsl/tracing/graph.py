"""The traced program: tensors, operations and graphs over global named tensors.

A graph knows nothing of devices. It is static single assignment: an `Operation` makes its output
tensors once, from tensors made before it. Tensors are compared by identity.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.late import late
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.idioms import answer_jax, by_name, refuse
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.source import UNKNOWN, Source

if TYPE_CHECKING:
    from meshdsl.tracing.trace import Trace

Aval = tuple[Shape, np.dtype]


class TracedTensor(Tensor):
    """A named tensor of a traced program; it has dims and a dtype, never data."""

    __slots__ = ("dtype", "shape", "source", "trace")
    dtype: np.dtype
    shape: Shape

    def __init__(
        self, shape: Shape, dtype: np.dtype, source: Source = UNKNOWN, trace: Trace | None = None
    ):
        self.shape = shape
        self.dtype = dtype
        self.source = source
        self.trace = trace

    @property
    def dims(self) -> Shape:
        return self.shape

    def __str__(self) -> str:
        return f"{short(self.dtype)}{self.shape}"

    def __repr__(self) -> str:
        return f"Tensor({self})"

    def __bool__(self) -> bool:
        raise ValueError(
            f"the value of {self} is not known while tracing, so Python's `if`, `and`, `or` and "
            "`not` cannot use it; write md.where(...), md.cond(...), `&`, `|` or `~`"
        )

    def __int__(self) -> int:
        refuse(f"the value of {self} is not known while tracing: {_LATER}")

    __float__ = __complex__ = __index__ = __int__

    def __format__(self, form: str) -> str:
        if form:
            refuse(f"the value of {self} is not known while tracing: {_LATER}, or md.print(x)")
        return str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        refuse(f"the numbers of {self} are not known while tracing: {_LATER}")

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return by_name(function, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        refuse(f"np.{function.__name__} does not know traced tensors: see md's operations")

    @property
    def __jax_array__(self) -> Any:
        return answer_jax(f"the traced tensor {self}", "md.jit(f).as_jax(...) for JAX around it")

    __hash__ = object.__hash__


_LATER = "compute with tensors, or return it from the traced function and read the result"


class Work(enum.IntEnum):
    """What an operation does for one element of its result, from least to most."""

    NONE = 0  # moves or converts it
    STEP = 1  # one instruction of arithmetic
    DIVISION = 2  # a few
    FUNCTION = 3  # tens, as for exp
    CONTRACTION = 4  # reads many elements, as sums and products do


@dataclass(frozen=True)
class Primitive:
    """A kind of operation: its shape rule, its gradient rule, and what is known of it.

    Attributes:
        name: as printed, and as partition rules are registered by.
        rule: (inputs, params) -> one (shape, dtype) per output; raises ValueError with the reason.
        gradient: (operation, cotangents, wanted) -> one cotangent or None per input. `cotangents`
            has None for outputs that do not matter, `wanted` a bool per input.
        replay: for operations with bodies: re-emits the operation in a differentiable form and
            returns its outputs with the function that plays the part of `gradient`.
        push: for operations with bodies: re-emits the operation with its tangents; (operation,
            arguments, tangent or None per argument) -> outputs, and a tangent or None per output.
            Others are pushed by their gradient, transposed (`tangents`).
        flat: whether it is constant between jumps, as rounding is: it has a slope of zero, so a
            path through it is not differentiable.
        work: what it does per element. Operations up to `DIVISION` are cheap: the backward pass
            recomputes them. Operations from `DIVISION` on are not repeated for every reader.
        linear: the operands in which it is linear, so that they may be partial sums.
        additive: linear in all of `linear` at once (a sum), not in one at a time (a product).
        symbol: how it is printed between its operands, or before its one operand.
        effect: whether it does something besides its results, as printing does: it is kept, and
            done each time, though nothing may need its results.
    """

    name: str
    rule: Callable[[Sequence[Tensor], Mapping[str, Any]], Sequence[Aval]]
    gradient: Callable[[Operation, Sequence, Sequence[bool]], Sequence] | None = None
    replay: Callable[..., tuple[Sequence[Tensor], Callable]] | None = None
    push: Callable[..., tuple[Sequence[Tensor], Sequence]] | None = None
    flat: bool = False
    work: Work = Work.CONTRACTION
    linear: tuple[int, ...] = ()
    additive: bool = False
    symbol: str = ""
    effect: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """One application of a primitive.

    Attributes:
        name: the primitive's.
        bodies: the graphs that it runs: the body of a loop, the branches of a cond.
    """

    primitive: Primitive
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    source: Source = UNKNOWN
    # Worked out once: lowering asks for these some seventy times.
    name: str = field(init=False, repr=False)
    bodies: tuple[Graph, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.primitive.name)
        bodies = [value for value in self.params.values() if isinstance(value, Graph)]
        if bodies:
            object.__setattr__(self, "bodies", tuple(bodies))

    @property
    def effect(self) -> bool:
        """Whether this, or something that it runs, does more than make its results."""
        return self.primitive.effect or any(
            op.effect for body in self.bodies for op in body.operations
        )


@dataclass(frozen=True, eq=False)
class Graph:
    """Operations in order, from inputs to outputs.

    Attributes:
        input_paths: one per input, starting with the traced function's parameter name; empty for
            the bodies of operations.
        output_paths: one per output, from the returned tree.
        names: paths of tensors inside, as lowering reads them off `md.name`.
        notes: what a user should know of the program, for its reports.
    """

    inputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Tensor, ...]
    name: str = ""
    input_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()
    names: Mapping[Tensor, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def prune(self) -> Graph:
        """Returns this graph without operations that have no effect and that no output needs."""
        needed = set(self.outputs)
        kept = []
        for operation in reversed(self.operations):
            if any(output in needed for output in operation.outputs) or operation.effect:
                needed.update(operation.inputs)
                kept.append(operation)
        return replace(self, operations=tuple(reversed(kept)))

    def __str__(self) -> str:
        return late("graph as text")(self)


class TensorNames:
    """Names tensors by numbers, `t0`, `t1`, in order of appearance."""

    def __init__(self) -> None:
        self.names: dict[Tensor, str] = {}

    def name(self, tensor: Tensor) -> str:
        return self.names.setdefault(tensor, f"t{len(self.names)}")
