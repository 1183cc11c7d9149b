"""Expressions: the instructions of one statement, folded into formulas that read like it.

A value that is read once, by an instruction of the same statement, is written where it is read:
`x * rsqrt(sum(square(x), embed) / 256 + 1e-06)` instead of five lines. Collectives, scans, what
they read, and what a block returns are never folded away, and a formula that grows long is broken.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

from meshdsl.lowering.instructions import kind_of, named
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

LONGEST = 60
_NAME = "x" * 8  # what a value not yet named counts for

_NEVER_FOLDED = named(lambda kind: kind.own_line)


class Expressions:
    """The formulas of one block.

    Attributes:
        lines: the instructions that have a line of their own, in order.
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
        """Returns what an instruction computes, as a formula of named values."""
        return self._write(instruction, lambda value: self._operand(value, names))[0]

    def operand(self, value: Value, names: Mapping[Value, str]) -> str:
        """Returns a value's name, or its formula where it has none."""
        return self._operand(value, names)[0]

    def _operand(self, value: Value, names: Mapping[Value, str]) -> Formula:
        if value in self._folded:
            return self._write(self.maker[value], lambda inner: self._operand(inner, names))
        return names[value], ATOM

    def _fold_operands(self, instruction: Instruction) -> None:
        """Folds the operands of an instruction into it, the longest ones last."""
        foldable = (v for v in instruction.inputs if self._may_fold(v, instruction))
        candidates = dict.fromkeys(foldable)
        total = 12 + len(_NAME) * (len(instruction.inputs) - len(candidates))
        for value in sorted(candidates, key=lambda v: self._length[v]):
            if total + self._length[value] <= LONGEST or _is_nothing(self.maker[value]):
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
        if _is_nothing(maker):
            return True
        if reader.op in _NEVER_FOLDED or self._reads[value] > 1:
            return False
        return statement_at(maker.source) == statement_at(reader.source)

    def _write(self, instruction: Instruction, operand: Callable[[Value], Formula]) -> Formula:
        op, inputs = instruction.op, instruction.inputs
        kind = kind_of(op)
        if kind.elementwise:  # which broadcast by name anyhow
            inputs = tuple(self._unbroadcast(value) for value in inputs)
        if kind.symbol:
            return operate(kind.symbol, [operand(value) for value in inputs])
        if op == "full":
            return number(parameters_of(instruction, Full)["value"]), ATOM
        arguments = [operand(value)[0] for value in inputs] + _extras(instruction)
        called = kind.word or op
        if op == "local":
            called = parameters_of(instruction, Local)["definition"].name
        return f"{called}({', '.join(arguments)})", ATOM

    def _unbroadcast(self, value: Value) -> Value:
        while value in self._folded and self.maker[value].op == "broadcast":
            (value,) = self.maker[value].inputs
        return value


def _is_nothing(instruction: Instruction) -> bool:
    """Whether an instruction is a constant or this device's place: written wherever it is read."""
    return instruction.op in ("full", "device_index")


def _extras(instruction: Instruction) -> list[str]:
    """Returns what stands after the operands: dims, axes, dtypes."""
    op, (out, *_) = instruction.op, instruction.outputs
    if op == "einsum":
        have = Shape({d.name: d for v in instruction.inputs for d in v.shape}.values())
        over = [name for name in have.names if out.shape.find(name) is None]
        return [f"over={'+'.join(over)}"] if over else []
    if kind_of(op).scores:
        seen = parameters_of(instruction, Attention)
        window = [f"window={seen['window']}"] if seen["window"] else []
        return [seen["memory"], *(["causal"] if seen["causal"] else []), *window]
    if op in COLLECTIVES or op == "slice":
        return _moved(instruction)
    if along := kind_of(op).along:
        dims = instruction.params[along]
        return list(dims) if along == "over" else [dims]
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
    """Returns how a collective or a slice combines, its dims, and its axes."""
    params = collective.params
    dims = [params[key] for key in ("dim", "concat", "split") if key in params]
    kind = [params["kind"]] if params.get("kind", "sum") != "sum" else []
    words = (*kind, " -> ".join(dims), "+".join(axes_of(collective)))
    return [word for word in words if word]


def _positions(instruction: Instruction) -> list[str]:
    """Returns the positions that a window has of its operand: `length[0:8:2]`."""
    params, (out,) = parameters_of(instruction, Window), instruction.outputs
    start, stride = params["start"], params["stride"]
    stop = start + stride * out.local.get(params["dim"]).size
    step = f":{stride}" if stride != 1 else ""
    spread = [f"1 in {params['dilation']}"] if params["dilation"] > 1 else []
    return [f"{params['dim']}[{start}:{stop}{step}]", *spread]
