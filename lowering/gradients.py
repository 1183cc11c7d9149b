"""Gradients: which values of a program are gradients, and of which values.

A statement's part of the backward pass computes the gradients of what the statement read in the
forward pass. Which of these it is follows from the dims. Where several have these dims, it follows
from what is read: a gradient that comes in belongs to the result of one run of the statement, and
of one of its lines; and what is multiplied with a gradient is the other factor. Of a run and its
recomputation, the one in the same block is meant. A sum of gradients of a value is one, too. What
is still ambiguous is left out. Nothing of this is recorded while a function is traced.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.tracing.statements import Statement

Line = tuple[Instruction, Sequence[Value]]  # an instruction, and what its formula reads


@dataclass(frozen=True)
class _Run:
    """One run of a statement in the forward pass.

    Attributes:
        block: where it is.
        reads: what it reads, by the first form of each value.
        makers: the first forms of its results, and those of what their lines read.
        values: the first forms of all of these.
    """

    block: Block
    reads: Mapping[Value, Value]
    makers: Mapping[Value, frozenset[Value]]
    values: frozenset[Value]

    def closeness(self, block: Block, read: Set[Value], arriving: Set[Value]) -> tuple[int, bool]:
        """Returns how much of this run some lines of the backward pass read.

        Args:
            arriving: the values whose gradients these lines read.
        """
        return len(self.values & read) + len(self.makers.keys() & arriving), block is self.block


class Gradients:
    """The gradients that are known so far; filled in the order of the program."""

    def __init__(self) -> None:
        self._first: dict[Value, Value] = {}  # of moved values, and of those inside of bodies
        self._starts: dict[Value, Value] = {}  # of carries
        self._of: dict[Value, Value] = {}
        self._runs: dict[tuple[str, int], list[_Run]] = collections.defaultdict(list)
        self._summands: dict[Value, list[Value]] = {}  # of sums, which hand a gradient on
        self._made: dict[tuple[str, int], set[Value]] = collections.defaultdict(set)

    def same(self, value: Value, original: Value) -> None:
        """Notes that a value is another one, moved, stacked, or inside of a body."""
        self._first[value] = self._root(original)
        if original in self._of:
            self._of[value] = self._of[original]

    def carried(self, inside: Value, start: Value) -> None:
        """Notes the value that the carry of a loop starts as."""
        self._starts[inside] = self._root(start)
        if start in self._of:
            self._of[inside] = self._of[start]

    def carried_out(self, outside: Value, inside: Value) -> None:
        """Notes the value of a carry at the end of a body, and after the loop."""
        self.same(outside, inside)
        target = self._of.get(inside)
        if target in self._starts:  # the loop went back from the results of another to its start
            self._of[outside] = self._starts[target]

    def note(self, block: Block, statement: Statement, lines: Sequence[Line]) -> None:
        """Notes one run of a statement in the forward pass, or what is computed again of one."""
        key = statement.file, statement.line
        reads = {self._root(value): value for _, read in lines for value in read}
        makers = {
            output: frozenset(map(self._root, read)) for i, read in lines for output in i.outputs
        }
        # A part of a run is computed again of what it read and made.
        again = [run for run in self._runs[key] if reads and reads.keys() <= run.values]
        if len(again) == 1 and again[0].block is not block:
            reads, makers = {**again[0].reads, **reads}, {**again[0].makers, **makers}
        values = frozenset(reads.keys() | makers.keys())
        self._made[key].update(makers)
        for instruction, read in lines:
            if instruction.op == "add":
                alike = [v for v in read if v in instruction.inputs]
                self._summands[instruction.outputs[0]] = [*map(self._root, alike)]
        self._runs[key].append(_Run(block, reads, makers, values))

    def targets(
        self, block: Block, statement: Statement, lines: Sequence[Line]
    ) -> dict[Value, Value]:
        """Returns the values whose gradients a statement's part of the backward pass computes.

        It has no entry for results that may be the gradients of several values.
        """
        key = statement.file, statement.line
        read = {value for _, values in lines for value in values}
        roots, arriving = {*map(self._root, read)}, self._arriving(read)
        by_rank: dict[tuple[int, bool], list[_Run]] = collections.defaultdict(list)
        for run in self._runs[key]:
            by_rank[run.closeness(block, roots, arriving)].append(run)
        closest = [by_rank[rank] for rank in sorted(by_rank, reverse=True)]
        made = self._made[key]  # by the statement itself, on the way to its result
        targets: dict[Value, Value] = {}
        for instruction, values in lines:
            assigned: set[Value] = set()
            for output in instruction.outputs:
                dims = frozenset(output.shape)
                options: dict[Value, Value] = {}
                for runs in closest:
                    options = {
                        root: value
                        for run in runs
                        for root, value in run.reads.items()
                        if frozenset(value.shape) == dims
                        and root not in made
                        and root not in assigned
                    }
                    if options:
                        options = self._narrowed(options, runs, values)
                        break
                if not options and instruction.op == "add":
                    summands = (v for v in values if v in self._of and frozenset(v.shape) == dims)
                    options = {self._of[v]: self._of[v] for v in summands}
                if len(options) == 1 or (options and len(instruction.outputs) > 1):
                    root = next(iter(options))
                    assigned.add(root)
                    self._of[output] = root
                    targets[output] = options[root]
        return targets

    def _narrowed(
        self, options: dict[Value, Value], runs: Sequence[_Run], read: Sequence[Value]
    ) -> dict[Value, Value]:
        """Returns those of the options that a line's operands speak for."""
        arriving = self._arriving(read)
        of_line = {root for run in runs for v in arriving for root in run.makers.get(v, ())}
        factors = {*map(self._root, read)}
        for kept in (options.keys() & of_line, options.keys() - factors):
            if len(options) > 1 and kept:
                options = {root: value for root, value in options.items() if root in kept}
        return options

    def _arriving(self, read: Collection[Value]) -> set[Value]:
        """Returns the values whose gradients are among those read: also the summands of sums."""
        reached: set[Value] = set()
        waiting = [self._of[value] for value in read if value in self._of]
        while waiting:
            value = waiting.pop()
            if value not in reached:
                reached.add(value)
                waiting += self._summands.get(value, ())
        return reached

    def _root(self, value: Value) -> Value:
        return self._first.get(value, value)
