"""Expressions: the instructions of one statement, folded into formulas that read like it.

A value that is read once, by an instruction of the same statement, is printed where it is read:
`x * rsqrt(sum(square(x), embed) / 256 + 1e-06)` instead of five lines. Collectives, scans, their
operands and the results of a block are never folded. A formula that would be too long is printed on
several lines.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

from meshdsl.lowering.instructions import kind_of, kinds_with
from meshdsl.lowering.parameters import (
    Attention,
    Full,
    Local,
    Rename,
    Window,
    axes_of,
    parameters_of,
)
from meshdsl.lowering.program import COLLECTIVES, Block, Instruction, Value
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tracing.formulas import ATOM, Formula, number, operate
from meshdsl.tracing.statements import statement_at

LONGEST = 60  # characters of a formula
_NAME = "x" * 8  # stands for a value without a name when lengths are estimated

_NEVER_FOLDED = kinds_with(lambda kind: kind.own_line)


class Expressions:
    """The formulas of one block.

    Attributes:
        lines: the instructions that are printed on their own lines, in order.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.maker = {v: i for i in block.instructions for v in i.outputs}
        self._reads = collections.Counter(v for i in block.instructions for v in i.inputs)
        self._outputs = frozenset(block.outputs)
        self._folded: set[Value] = set()
        self._length: dict[Value, int] = {}
        for instruction in block.instructions:
            self._fold_operands(instruction)
        self.lines = tuple(i for i in block.instructions if i.outputs[0] not in self._folded)

    def text(self, instruction: Instruction, names: Mapping[Value, str]) -> str:
        """Returns the formula of an instruction, over named values."""
        return self._write(instruction, lambda value: self._operand(value, names))[0]

    def operand(self, value: Value, names: Mapping[Value, str]) -> str:
        """Returns a value's name, or its formula if it has none."""
        return self._operand(value, names)[0]

    def _operand(self, value: Value, names: Mapping[Value, str]) -> Formula:
        if value in self._folded:
            return self._write(self.maker[value], lambda inner: self._operand(inner, names))
        return names[value], ATOM

    def _fold_operands(self, instruction: Instruction) -> None:
        """Folds operands into an instruction while its formula is short, the shortest first."""
        foldable = (v for v in instruction.inputs if self._may_fold(v, instruction))
        candidates = dict.fromkeys(foldable)
        # The name of the operation, and brackets, are about 12 characters.
        total = 12 + len(_NAME) * (len(instruction.inputs) - len(candidates))
        for value in sorted(candidates, key=lambda v: self._length[v]):
            if total + self._length[value] <= LONGEST or _is_constant(self.maker[value]):
                self._folded.add(value)
                total += self._length[value]
            else:
                total += len(_NAME)
        text, _ = self._write(instruction, self._measured)
        for value in instruction.outputs:
            self._length[value] = len(text)

    def _measured(self, value: Value) -> Formula:
        return "x" * (self._length[value] if value in self._folded else len(_NAME)), ATOM

    def _may_fold(self, value: Value, reader: Instruction) -> bool:
        maker = self.maker.get(value)
        if maker is None or value in self._outputs or maker.op in _NEVER_FOLDED:
            return False
        if len(maker.outputs) > 1:  # a formula has one value
            return False
        if _is_constant(maker):
            return True
        if reader.op in _NEVER_FOLDED or self._reads[value] > 1:
            return False
        return statement_at(maker.source) == statement_at(reader.source)

    def _write(self, instruction: Instruction, operand: Callable[[Value], Formula]) -> Formula:
        op, inputs = instruction.op, instruction.inputs
        kind = kind_of(op)
        if kind.elementwise:  # elementwise operations broadcast by name anyway
            inputs = tuple(self._unbroadcast(value) for value in inputs)
        if kind.symbol:
            return operate(kind.symbol, [operand(value) for value in inputs])
        if op == "full":
            return number(parameters_of(instruction, Full)["value"]), ATOM
        arguments = [operand(value)[0] for value in inputs] + _extras(instruction)
        word = kind.word or op
        if op == "local":
            word = parameters_of(instruction, Local)["definition"].name
        return f"{word}({', '.join(arguments)})", ATOM

    def _unbroadcast(self, value: Value) -> Value:
        while value in self._folded and self.maker[value].op == "broadcast":
            (value,) = self.maker[value].inputs
        return value


def _is_constant(instruction: Instruction) -> bool:
    """Whether an instruction is a constant or a device's index; these are always folded."""
    return instruction.op in ("full", "device_index")


def _extras(instruction: Instruction) -> list[str]:
    """Returns the arguments that are printed after the operands: dims, axes, dtypes."""
    op, (out, *_) = instruction.op, instruction.outputs
    if op == "einsum":
        dims = Shape({d.name: d for v in instruction.inputs for d in v.shape}.values())
        over = [name for name in dims.names if out.shape.find(name) is None]
        return [f"over={'+'.join(over)}"] if over else []
    if kind_of(op).scores:
        attention = parameters_of(instruction, Attention)
        window = [f"window={attention['window']}"] if attention["window"] else []
        return [attention["memory"], *(["causal"] if attention["causal"] else []), *window]
    if op in COLLECTIVES or op == "slice":
        return _moved(instruction)
    if along := kind_of(op).along:
        dim_or_dims = instruction.params[along]
        return list(dim_or_dims) if along == "over" else [dim_or_dims]
    if op == "window":
        return _positions(instruction)
    if op == "device_index":
        return ["+".join(axes_of(instruction))]
    if op == "rename":
        return [f"{old} -> {new}" for old, new in parameters_of(instruction, Rename)["names"]]
    if op == "cast":
        return [short(out.dtype)]
    if op == "broadcast":
        return list(out.shape.without(instruction.inputs[0].shape.names).names)
    if op in ("reshape", "transpose", "iota"):
        return list(out.shape.names)
    return []


def _moved(collective: Instruction) -> list[str]:
    """Returns the kind of reduction, the dims and the axes of a collective or a slice."""
    params = collective.params
    dims = [params[key] for key in ("dim", "concat", "split") if key in params]
    kind = [params["kind"]] if params.get("kind", "sum") != "sum" else []
    words = (*kind, " -> ".join(dims), "+".join(axes_of(collective)))
    return [word for word in words if word]


def _positions(instruction: Instruction) -> list[str]:
    """Returns the positions of the operand that a window reads: `length[0:8:2]`."""
    params, (out,) = parameters_of(instruction, Window), instruction.outputs
    start, stride = params["start"], params["stride"]
    stop = start + stride * out.local.get(params["dim"]).size
    step = f":{stride}" if stride != 1 else ""
    spread = [f"1 in {params['dilation']}"] if params["dilation"] > 1 else []
    return [f"{params['dim']}[{start}:{stop}{step}]", *spread]
