"""The traced program: tensors, operations and graphs over global named tensors.

A graph knows nothing of devices. It is static single assignment: an `Operation` makes its output
tensors once, from tensors made before it. Tensors are compared by identity.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshdsl.late import late
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.idioms import answer_jax, by_name, refuse, refuse_numpy
from meshdsl.tensors.slots import setters
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.source import UNKNOWN, Source

if TYPE_CHECKING:
    from meshdsl.tracing.trace import Trace

Aval = tuple[Shape, np.dtype]
Linear = Callable[["Operation"], tuple[int, ...]]


class TracedTensor(Tensor):
    """A named tensor of a traced program; it has dims and a dtype, never data.

    Examples:
        >>> @md.jit
        ... def double(x):
        ...     print(x, type(x) is md.TracedTensor)
        ...     return x * 2.0
        >>> double(md.named([1.0, 2.0], ["embed"])).data
        f32[embed=2] True
        Array([2., 4.], dtype=float32)
    """

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

    def _repr_html_(self) -> str | None:
        """Returns dtype, dims and the line that made it for notebooks."""
        return late("value in a notebook")(self)

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
        refuse_numpy(function.__name__, *self._of_jax())

    @property
    def __jax_array__(self) -> Any:
        return answer_jax(*self._of_jax())

    def _of_jax(self) -> tuple[str, str]:
        return f"the traced tensor {self}", "md.jit(f).as_jax(...) for JAX around it"

    __hash__ = object.__hash__


_LATER = "compute with tensors, or return it from the traced function and read the result"


class Work(enum.IntEnum):
    """The work of an operation for one element of its result, from least to most."""

    NONE = 0  # moves or converts it
    STEP = 1  # one instruction of arithmetic
    DIVISION = 2  # a few
    FUNCTION = 3  # tens, as for exp
    CONTRACTION = 4  # reads many elements, as sums and products do


class Form(enum.Enum):
    """How the elements of a result follow from those of the operands."""

    SAME = "the results are the last operands"
    RENAMED = "the operand, with dims of other names"
    ARRANGED = "the operand, its dims in another order or repeated along more of them"
    REGROUPED = "the operand, with a dim split into several, or several merged into one"
    ELEMENTWISE = "each comes of one element of each operand; they meet by the names of dims"
    REDUCTION = "each comes of the operand's elements along the dims that the result lacks"
    GENERATED = "each comes of its position; there are no operands"
    OTHER = "nothing is said"

    @property
    def moves(self) -> bool:
        """Whether all elements of results are elements of operands."""
        return self in (Form.SAME, Form.RENAMED, Form.ARRANGED, Form.REGROUPED)


@dataclass(frozen=True)
class Primitive:
    """A kind of operation: its shape rule, its gradient rule, and facts about it.

    Every fact has a default that is safe: it says that nothing is known.

    Attributes:
        name: as printed, and as partition rules are registered by.
        rule: (inputs, params) -> one (shape, dtype) per output; raises ValueError with the reason.
        gradient: (operation, cotangents, wanted) -> one cotangent or None per input. `cotangents`
            has None for outputs that do not matter, `wanted` a bool per input.
        replay: for operations with bodies: re-emits the operation in a differentiable form and
            returns its outputs, with a function to use instead of `gradient`.
        push: for operations with bodies: re-emits the operation with its tangents; (operation,
            arguments, tangent or None per argument) -> outputs, and a tangent or None per output.
            Others are pushed by their gradient, transposed (`tangents`).
        flat: whether it is constant between jumps, as rounding is: it has a slope of zero, so a
            path through it is not differentiable.
        work: what it does per element. Operations up to `DIVISION` are cheap: the backward pass
            recomputes them. Operations from `DIVISION` on are not repeated for every reader.
        form: what the elements of its results are.
        positionwise: it has one result, and works on each position of a dim by itself, for all dims
            that this and an operand have, apart from those that its parameters name.
        combines: how it combines elements of an operand in one element of its result. The combined
            results for two operands are the result for the combined operands.
        linear: the operands in which its one result is linear, so that they may be partial sums;
            or a function of the operation that returns them (`Operation.linear`).
        additive: linear in all of `linear` at once (a sum), not in one at a time (a product).
        chooses: its results are chosen elements, or their places. No slope is meant there.
        for_gradient: the numbers of the results that its gradient alone reads.
        mark: it says something of its last operands, which its results are; lowering drops it.
        inlined: it runs its body once, on its operands; lowering writes the body in its place.
        result_graphs: the parameters with the graphs whose outputs its results are: the body of a
            loop, the branches of a cond.
        symbol: how it is printed between its operands, or before its one operand.
        word: its public name, if that is not `name`.
        effect: whether it does something besides its results, as printing does: it is kept, and
            done each time, though nothing may need its results.

    Raises:
        ValueError: its facts contradict each other.
    """

    name: str
    rule: Callable[[Sequence[Tensor], Mapping[str, Any]], Sequence[Aval]]
    gradient: Callable[[Operation, Sequence, Sequence[bool]], Sequence] | None = None
    replay: Callable[..., tuple[Sequence[Tensor], Callable]] | None = None
    push: Callable[..., tuple[Sequence[Tensor], Sequence]] | None = None
    flat: bool = False
    work: Work = Work.CONTRACTION
    form: Form = Form.OTHER
    positionwise: bool = False
    combines: Literal["sum", "max", "min"] | None = None
    linear: tuple[int, ...] | Linear = ()
    additive: bool = False
    chooses: bool = False
    for_gradient: tuple[int, ...] = ()
    mark: bool = False
    inlined: bool = False
    result_graphs: tuple[str, ...] = ()
    symbol: str = ""
    word: str = ""
    effect: bool = False

    def __post_init__(self) -> None:
        if problems := [problem for wrong, problem in self._contradictions() if wrong]:
            raise ValueError(f"primitive `{self.name}` is {', and '.join(problems)}")

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Yields whether facts contradict each other, with how."""
        rearranging = (Form.RENAMED, Form.ARRANGED, Form.REGROUPED, Form.ELEMENTWISE)
        form = self.form.name.lower()
        yield self.form in rearranging and not self.positionwise, f"{form}, but not positionwise"
        yield self.form is Form.SAME and self.positionwise, f"{form}, so not called positionwise"
        yield self.mark and self.form is not Form.SAME, f"a mark, but {form}"
        yield self.mark and self.inlined, "a mark, but inlined"
        yield self.inlined and not self.result_graphs, "inlined, but names no result_graphs"
        few = not callable(self.linear) and len(self.linear) < 2
        yield self.additive and few, "additive, but not linear in two operands"
        yield self.flat and bool(self.linear), "flat, but linear"
        adds = self.combines == "sum"
        yield adds and not self.linear, "combining by sum, but linear in no operand"
        extreme = self.combines in ("max", "min")
        yield extreme and bool(self.linear), f"linear, but combines by {self.combines}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True, init=False)
class Operation:
    """One application of a primitive.

    Attributes:
        name: the primitive's.
        bodies: the graphs that it runs: the body of a loop, the branches of a cond.
    """

    primitive: Primitive
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: Mapping[str, Any]
    source: Source
    # Computed once: lowering reads these some seventy times.
    name: str = field(init=False, repr=False)
    bodies: tuple[Graph, ...] = field(init=False, repr=False)

    def __init__(
        self,
        primitive: Primitive,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        params: Mapping[str, Any] | None = None,
        source: Source = UNKNOWN,
    ) -> None:
        bodies: tuple[Graph, ...] = ()
        if params:
            bodies = tuple([value for value in params.values() if isinstance(value, Graph)])
        _set_primitive(self, primitive)
        _set_inputs(self, inputs)
        _set_outputs(self, outputs)
        _set_params(self, {} if params is None else params)
        _set_source(self, source)
        _set_name(self, primitive.name)
        _set_bodies(self, bodies)

    @property
    def linear(self) -> tuple[int, ...]:
        """The operands in which its one result is linear."""
        linear = self.primitive.linear
        return linear(self) if callable(linear) else linear

    @property
    def effect(self) -> bool:
        """Whether this, or an operation in its bodies, does more than compute its results."""
        return self.primitive.effect or any(
            op.effect for body in self.bodies for op in body.operations
        )


(
    _set_primitive,
    _set_inputs,
    _set_outputs,
    _set_params,
    _set_source,
    _set_name,
    _set_bodies,
) = setters(Operation)


@dataclass(frozen=True, eq=False)
class Graph:
    """Operations in order, from inputs to outputs.

    Attributes:
        input_paths: one per input, starting with the traced function's parameter name; empty for
            the bodies of operations.
        output_paths: one per output, from the returned tree.
        names: paths of tensors inside, as lowering reads them off `md.name`.
        notes: facts about the program for the user, shown in reports.
        derived: graphs that passes made of this one, by their name; replaced graphs start without.

    Examples:
        >>> x = md.spec(md.dims(batch=8, embed=4))
        >>> graph = md.jit(lambda x: md.sum(x * 2.0, "embed")).trace(x)
        >>> print([operation.name for operation in graph.operations], graph.input_paths)
        ['full', 'multiply', 'sum'] ('x',)
    """

    inputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Tensor, ...]
    name: str = ""
    input_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()
    names: Mapping[Tensor, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    derived: dict[str, Graph] = field(default_factory=dict, init=False, repr=False)

    def prune(self) -> Graph:
        """Returns this graph without operations that have no effect and that no output needs."""
        needed = set(self.outputs)
        needed_operations = []
        for operation in reversed(self.operations):
            if any(output in needed for output in operation.outputs) or operation.effect:
                needed.update(operation.inputs)
                needed_operations.append(operation)
        return replace(self, operations=tuple(reversed(needed_operations)))

    def __str__(self) -> str:
        return late("graph as text")(self)

    def _repr_html_(self) -> str | None:
        """Returns the lines of the program for notebooks, with dims in colours."""
        return late("value in a notebook")(self)


class TensorNames:
    """Names tensors by numbers, `t0`, `t1`, in order of appearance."""

    def __init__(self) -> None:
        self.names: dict[Tensor, str] = {}

    def name(self, tensor: Tensor) -> str:
        return self.names.setdefault(tensor, f"t{len(self.names)}")
