"""Wide sums: partial sums in half precision are computed, added up and reduced in float32.

A single device adds up in float32 and rounds to float16 once. Devices that round their partial sums
may overflow where the sum does not: 4e4 + 4e4 - 4e4 - 4e4. So the partial sums of a sum, a product,
a convolution, a scatter, an attention to parts of a memory or its gradient are computed in float32,
and so are operations that pass them on. A cast after the reduction rounds the sum. `take` and
`index` only add zeros to an element, and stay in half precision.

A wide sum is reduced where it leaves or enters the body of a loop or a branch. A cast to float32
reads the wide sum itself: gradients that are added up in float32 stay partial across loops.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.options import Options, dtype_of_sums
from meshdsl.lowering.stages import Planned
from meshdsl.ops.elementwise.arithmetic import CAST
from meshdsl.ops.products.attention import ATTENTION, ATTENTION_GRADIENT
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, TracedTensor

_WIDE = np.dtype("float32")


@dataclass
class Widened:
    """A graph whose partial sums are wide.

    Attributes:
        layouts: the layouts of the wide tensors.
    """

    graph: Graph
    layouts: dict[Tensor, TensorLayout] = field(default_factory=dict)


def widen(planned: Planned, keep: Mapping[Tensor, frozenset[str]], options: Options) -> Widened:
    """Returns a graph that reduces partial sums of half precision in float32.

        widen(planned, place_reductions(planned), Options(reduce_dtype="float32")).graph

    Args:
        keep: the axes over which tensors pass partial sums on; see `partial_sums`.

    Returns:
        The graph, which may have unused operations and tensors if it has changed; see `prune`.
    """
    widened = Widened(planned.graph)
    dtypes = {tensor.dtype for tensor in planned.layouts}
    narrow = frozenset(d for d in dtypes if dtype_of_sums(d, options) != d)
    if not narrow:  # as in most programs
        return widened
    widening = _Widening(planned, keep, narrow, widened.layouts)
    widened.graph = widening.rewrite(planned.graph)
    return widened


@dataclass
class _Widening:
    planned: Planned
    keep: Mapping[Tensor, frozenset[str]]
    dtypes: frozenset[np.dtype]
    layouts: dict[Tensor, TensorLayout]
    wide: dict[Tensor, Tensor] = field(default_factory=dict)
    instead: dict[Tensor, Tensor] = field(default_factory=dict)

    def rewrite(self, graph: Graph) -> Graph:
        operations: list[Operation] = []
        for op in graph.operations:
            operations += self._operation(op)
        outputs = self._now(graph.outputs)
        before, after = (*graph.operations, *graph.outputs), (*operations, *outputs)
        if len(before) == len(after) and all(map(operator.is_, before, after)):
            return graph
        return replace(graph, operations=tuple(operations), outputs=outputs)

    def _operation(self, op: Operation) -> list[Operation]:
        """Returns the operations that replace one."""
        inputs = self._now(op.inputs)
        if any(new is not old for new, old in zip(inputs, op.inputs, strict=True)):
            current = replace(op, inputs=inputs)
        else:
            current = op
        if op.bodies:
            return [self._with_bodies(current)]
        if op.name == "cast" and inputs[0] in self.wide and _holds(op.outputs[0].dtype):
            return self._read_wide(current)
        if op.primitive in (ATTENTION, ATTENTION_GRADIENT):
            return self._attention(op, current)
        if len(op.outputs) > 1 or op.outputs[0].dtype not in self.dtypes:
            return [current]
        passes = op.outputs[0] in self.keep and any(t in self.wide for t in inputs)
        if not passes and not (op.primitive.combines == "sum" and self._leaves_a_sum(op)):
            return [current]
        before: list[Operation] = []
        if passes:
            inputs = tuple(self._widened(t, op, before) for t in inputs)
        (out,) = op.outputs
        sums = self._sums(out)
        widened = replace(op, inputs=inputs, outputs=(sums,))
        return [*before, widened, _cast(op, sums, out)]

    def _attention(self, op: Operation, current: Operation) -> list[Operation]:
        """Returns the operations that replace an attention, or its gradients: each a sum or not."""
        outputs, after = list(op.outputs), []
        for number, out in enumerate(op.outputs):
            if out.dtype in self.dtypes and self._leaves_a_sum(op, number):
                outputs[number] = self._sums(out)
                after.append(_cast(op, outputs[number], out))
        return [replace(current, outputs=tuple(outputs)) if after else current, *after]

    def _sums(self, out: Tensor) -> Tensor:
        """Returns the wide tensor that stands for a result."""
        sums = TracedTensor(out.shape, _WIDE, out.source)
        self.wide[out] = sums
        self.layouts[sums] = self.planned.layouts[out]
        return sums

    def _with_bodies(self, op: Operation) -> Operation:
        bodies = {
            name: self.rewrite(body) for name, body in op.params.items() if isinstance(body, Graph)
        }
        if all(body is op.params[name] for name, body in bodies.items()):
            return op
        return replace(op, params={**op.params, **bodies})

    def _read_wide(self, op: Operation) -> list[Operation]:
        (tensor,), (out,) = op.inputs, op.outputs
        if out.dtype != _WIDE:
            return [replace(op, inputs=(self.wide[tensor],))]
        self.instead[out] = self.wide[tensor]
        return []

    def _leaves_a_sum(self, op: Operation, number: int = 0) -> bool:
        """Whether devices have partial sums that differ from the result of that number."""
        mesh = self.planned.mesh
        axes = [axis for axis, _ in self.planned.strategies[op].results[number].partial]
        return any(mesh.sizes[axis] > 1 for axis in axes)

    def _widened(self, tensor: Tensor, op: Operation, before: list[Operation]) -> Tensor:
        """Returns an operand in float32, cast by an operation that is added to `before`."""
        if tensor in self.wide:
            return self.wide[tensor]
        if tensor.dtype not in self.dtypes:
            return tensor
        sums = TracedTensor(tensor.shape, _WIDE, tensor.source)
        before.append(_cast(op, tensor, sums))
        return sums

    def _now(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.instead.get(t, t) for t in tensors)


def _holds(dtype: np.dtype) -> bool:
    return is_float(dtype) and dtype.itemsize >= _WIDE.itemsize


def _cast(op: Operation, tensor: Tensor, out: Tensor) -> Operation:
    return replace(
        op, primitive=CAST, inputs=(tensor,), outputs=(out,), params={"dtype": out.dtype}
    )
