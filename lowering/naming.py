"""Naming: names for the values of a program, from the user's source.

* An input has the shortest unique end of its path: `query`, or `mu.query` if several paths end with
  `query`. An output with the path of an input is `new_query`.
* The last value of a statement has the name that the statement assigns to, or the name of the
  function around it. The values before it add their operation: `weights.max`, `weights.exp`.
* A moved value has a prime: `h'` is `h` in another layout. A second `x` is `x.2`.
* In the backward pass, the gradient of a value that its statement read in the forward pass is named
  after that value, `w_in_grad`; see `gradients.py`. Others are named after the statement: `h_grad`.
  What a statement adds up to a gradient also has its operation: `h_grad.einsum`.
* `h[layers]` is the stack of the values `h` of every iteration of a scan over `layers`.

Names are unique in their block. They depend only on the program and the text of its source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from meshdsl.lowering.expressions import Expressions
from meshdsl.lowering.gradients import Gradients
from meshdsl.lowering.instructions import kinds_with
from meshdsl.lowering.parameters import Scan, While, parameters_of
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.tensors.paths import path_names
from meshdsl.tracing.statements import Statement, statement_at

_MOVES = kinds_with(lambda kind: kind.moves)


class Names(dict[Value, str]):
    """The name of every value that is not folded into a formula, over all blocks of a program.

    Attributes:
        expressions: the formulas of every block.
        replacing: the outputs with the path, dims, dtype and layout of an input.
    """

    def __init__(self, program: SpmdProgram) -> None:
        super().__init__()
        self.expressions: dict[Block, Expressions] = {}
        self._bases: dict[Value, str] = {}
        self._gradients = Gradients()
        inputs = path_names(program.input_paths)
        scope = _Scope(self)
        for value, name in zip(program.block.inputs, inputs, strict=True):
            scope.define(value, name)
        replaced = _replaced(program)
        given = {
            value: f"new_{inputs[number]}"
            for value, number in replaced.items()
            if value not in program.block.inputs
        }
        self.replacing = frozenset(
            value
            for value, number in replaced.items()
            if _kind(value) == _kind(program.block.inputs[number])
        )
        self._name_block(program.block, scope, given)

    def _name_block(self, block: Block, scope: _Scope, given: dict[Value, str]) -> None:
        expressions = self.expressions[block] = Expressions(block)
        for statement, run in _runs(expressions.lines):
            computing = [i for i in run if not (i.op in _MOVES or i.bodies)]
            target = statement.names[0]
            lines = [(i, self._reads(i, expressions.maker)) for i in computing]
            targets: dict[Value, Value] = {}
            if statement.backward:
                targets = self._gradients.targets(block, statement, lines)
            else:
                self._gradients.note(block, statement, lines)
            last = {targets.get(v): i for i in computing for v in i.outputs}
            for instruction in run:
                if instruction.op == "scan":
                    self._name_scan(instruction, scope)
                elif instruction.op == "while":
                    self._name_while(instruction, scope, given)
                elif instruction.op == "cond":
                    self._name_cond(instruction, scope, given, statement)
                elif instruction.op in _MOVES:
                    self._name_moved(instruction, scope, given, target)
                elif instruction.outputs[0] in given:
                    scope.define(instruction.outputs[0], given[instruction.outputs[0]])
                elif statement.backward:
                    for output in instruction.outputs:
                        wanted = targets.get(output)
                        base = target if wanted is None else self._bases.get(wanted, target)
                        base = base if base.endswith("_grad") else f"{base}_grad"
                        part = "" if instruction is last[wanted] else f".{instruction.op}"
                        scope.define(output, base + part, base)
                elif 1 < len(statement.names) == len(computing):
                    scope.define(
                        instruction.outputs[0], statement.names[computing.index(instruction)]
                    )
                elif instruction is computing[-1]:
                    scope.define(instruction.outputs[0], target)
                else:
                    scope.define(instruction.outputs[0], f"{target}.{instruction.op}", target)
                for beside in instruction.outputs[1:]:
                    if beside not in self:
                        scope.define(beside, self._bases[instruction.outputs[0]])

    def _name_moved(
        self, instruction: Instruction, scope: _Scope, given: dict[Value, str], target: str
    ) -> None:
        for before, after in zip(instruction.inputs, instruction.outputs, strict=True):
            if after in given:
                scope.define(after, given[after])
            else:
                name = self.get(before) or target
                scope.define(after, f"{name}'", self._bases.get(before, name), primes=True)
            self._gradients.same(after, before)

    def _reads(self, instruction: Instruction, maker: dict[Value, Instruction]) -> list[Value]:
        """Returns the values that a line reads, also inside its formula."""
        reads: dict[Value, None] = {}
        seen: set[Value] = set()
        waiting = [*reversed(instruction.inputs)]
        while waiting:
            value = waiting.pop()
            if value in seen or not value.shape:
                continue
            seen.add(value)
            if value in self:
                reads[value] = None
            elif value in maker:
                made = maker[value]
                if made.op in _MOVES:  # perhaps of several values together
                    waiting.append(made.inputs[made.outputs.index(value)])
                else:
                    waiting += reversed(made.inputs)
        return [*reads]

    def _name_scan(self, scan: Instruction, scope: _Scope) -> None:
        params = parameters_of(scan, Scan)
        body, consts, carries = params["body"], params["consts"], params["carries"]
        stacked = f"[{params['dim']}]"
        inner = _Scope(self)
        for position, (outside, inside) in enumerate(zip(scan.inputs, body.inputs, strict=True)):
            base = self._bases.get(outside, "carry")
            moves = consts <= position < consts + carries
            name = base if moves else self.get(outside, base).removesuffix(stacked)
            inner.define(inside, name, base.removesuffix(stacked))
            if moves:
                self._gradients.carried(inside, outside)
            else:
                self._gradients.same(inside, outside)
        self._name_block(body, inner, {})
        for position, (inside, outside) in enumerate(zip(body.outputs, scan.outputs, strict=True)):
            if position < carries:
                self._gradients.carried_out(outside, inside)
                base = self._bases.get(scan.inputs[consts + position]) or self._bases[inside]
                scope.define(outside, base)
            else:
                self._gradients.same(outside, inside)
                scope.define(outside, self[inside] + stacked, self._bases[inside] + stacked)

    def _name_while(self, loop: Instruction, scope: _Scope, given: dict[Value, str]) -> None:
        consts = parameters_of(loop, While)["consts"]
        for body in loop.bodies:
            inner = _Scope(self)
            for position, (outside, inside) in enumerate(
                zip(loop.inputs, body.inputs, strict=True)
            ):
                base = self._bases.get(outside, "carry")
                inner.define(inside, self.get(outside, base) if position < consts else base, base)
                if position < consts:
                    self._gradients.same(inside, outside)
            self._name_block(body, inner, {})
        for start, outside in zip(loop.inputs[consts:], loop.outputs, strict=True):
            scope.define(outside, given.get(outside) or self._bases.get(start, "carry"))

    def _name_cond(
        self, cond: Instruction, scope: _Scope, given: dict[Value, str], statement: Statement
    ) -> None:
        for body in cond.bodies:
            inner = _Scope(self)
            for outside, inside in zip(cond.inputs[1:], body.inputs, strict=True):
                base = self._bases.get(outside, "value")
                inner.define(inside, self.get(outside, base), base)
                self._gradients.same(inside, outside)
            self._name_block(body, inner, {})
        count = len(cond.outputs)
        called = statement.names if len(statement.names) == count else statement.names[:1] * count
        for inside, outside, name in zip(cond.bodies[0].outputs, cond.outputs, called, strict=True):
            own = self._bases[inside] if statement.backward else name
            scope.define(outside, given.get(outside) or own)


class _Scope:
    """The names in use in one block."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.used: set[str] = set()

    def define(self, value: Value, name: str, base: str = "", primes: bool = False) -> None:
        """Names a value; a name in use gets a number, or another prime."""
        wanted, number = name, 1
        unique = wanted
        while unique in self.used:
            number += 1
            unique = wanted + "'" * (number - 1) if primes else f"{wanted}.{number}"
        self.used.add(unique)
        self.names[value] = unique
        self.names._bases[value] = base or wanted


def _runs(lines: Sequence[Instruction]) -> Iterator[tuple[Statement, list[Instruction]]]:
    """Yields the instructions statement by statement of the source."""
    for statement, run in itertools.groupby(lines, lambda line: statement_at(line.source)):
        yield statement, list(run)


def _replaced(program: SpmdProgram) -> dict[Value, int]:
    """Returns, for outputs with the path of an input, the number of that input.

    The first parts of the paths may differ: they name an argument, or a part of the result.
    """
    numbers = {_without_root(path): n for n, path in enumerate(program.input_paths)}
    numbers |= {path: n for n, path in enumerate(program.input_paths)}
    replaced: dict[Value, int] = {}
    for value, path in zip(program.block.outputs, program.output_paths, strict=True):
        number = numbers.get(path)
        if number is None and not path.startswith("gradients/"):
            number = numbers.get(_without_root(path))
        if path and number is not None:
            replaced.setdefault(value, number)
    return replaced


def _kind(value: Value) -> tuple[object, ...]:
    return value.shape, value.dtype, value.layout


def _without_root(path: str) -> str:
    """Returns a path without its first part, if at least two are left."""
    return path.split("/", 1)[1] if path.count("/") > 1 else path
