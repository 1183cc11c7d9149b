"""Touched rows: gradients of large tables that are never as large as the tables.

The gradient of a look-up is a `scatter_add`: a table of zeros but for the rows that were looked up.
Its norm reads all of it, and plain gradient descent reads it again beside the table. Here the rows
are added up where they are (`row_sums`: an update for each distinct row), elementwise work that
keeps zeros is done on these, sums add these, and what is added to a table is added to its rows in
place (`add_rows`):

    grad = scatter_add(updates, indices)           sums, places = row_sums(updates, indices)
    norm = sum(square(grad), rows, features)       norm = sum(square(sums), batch, features)
    new = table - rate * grad                      new = add_rows(table, -(rate * sums), places)

A row that several indices name is added up before it is squared or rounded, so these are the same
numbers, up to the order of sums. A factor that is not finite, by which 0 is not 0, makes only the
touched rows not finite.

It is done if every reader of the gradient allows it. Other elementwise work, such as a momentum or
a decay, makes every row anew in any case, and reads the gradient beside it. It is done for updates
that are much smaller than the table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.instructions import Fusion, kinds_with
from meshdsl.lowering.options import Options
from meshdsl.lowering.parameters import Indexed, Reduction, parameters_of
from meshdsl.lowering.passes.blocks import each_block
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value

_ALONE = frozenset(["abs", "cast", "negative", "square", "transpose"])  # of 0 they make 0
_FUSED = kinds_with(lambda kind: kind.fusion is Fusion.FUSED)
_LESS = 8  # how much less than the table is moved
_SORTING = 32  # sorting takes as long as moving each index that often


def touched_rows(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Returns a program that computes with the touched rows of tables where this moves less."""
    return each_block(program, lambda block: _of_block(block, program.mesh))


def _of_block(block: Block, mesh: Mesh) -> Block:
    scatters = [
        one
        for one in block.instructions
        if one.op == "scatter_add" and _pays(one) and not _has_pads(one, mesh)
    ]
    if not scatters:
        return block
    readers: dict[Value, list[Instruction]] = defaultdict(list)
    for instruction in block.instructions:
        for value in dict.fromkeys(instruction.inputs):
            readers[value].append(instruction)
    makers = {value: one for one in block.instructions for value in one.outputs}
    rewriter = _Rewriter(readers, makers, set(block.outputs))
    for scatter in scatters:
        rewriter.follow(scatter)
    if not rewriter.scatter_of:
        return block
    written = [new for one in block.instructions for new in rewriter.written(one)]
    return replace(block, instructions=tuple(written))


def _pays(scatter: Instruction) -> bool:
    """Whether the updates are much smaller than the table."""
    updates, indices = scatter.inputs
    moved = updates.bytes + _SORTING * indices.bytes
    return 0 < _LESS * moved <= scatter.outputs[0].bytes


def _has_pads(scatter: Instruction, mesh: Mesh) -> bool:
    """Whether there are pads among the updates of a row: sums must not stand in them."""
    _, indices = scatter.inputs
    own = indices.shape.without(parameters_of(scatter, Indexed)["pairs"])
    return any(d.size % mesh.extent(indices.layout.axes(d.name)) for d in own)


class _Rewriter:
    """What becomes of a block.

    Attributes:
        scatter_of: the scatter of the rows that an instruction reads, for each that changes.
        sums: for a value with zeros but for rows, the values of these rows.
        places: for a scatter, the rows.
    """

    def __init__(
        self,
        readers: Mapping[Value, Sequence[Instruction]],
        makers: Mapping[Value, Instruction],
        results: set[Value],
    ) -> None:
        self.readers, self.makers, self.results = readers, makers, results
        self.scatter_of: dict[Instruction, Instruction] = {}
        self.sums: dict[Value, Value] = {}
        self.places: dict[Instruction, Value] = {}

    def follow(self, scatter: Instruction) -> None:
        """Notes all that is computed from a scatter, if every reader allows it."""
        found = [scatter]
        waiting = [scatter.outputs[0]]
        while waiting:
            value = waiting.pop()
            if value in self.results:
                return
            for reader in self.readers[value]:
                if reader in self.scatter_of:
                    return
                if self._keeps_zeros(reader, value, scatter):
                    waiting.append(reader.outputs[0])
                elif not self._ends(reader, value, scatter):
                    return
                found.append(reader)
        if len(found) > 1:
            self.scatter_of.update(dict.fromkeys(found, scatter))

    def _keeps_zeros(self, reader: Instruction, value: Value, scatter: Instruction) -> bool:
        """Whether the results are zero, but for rows that come from the same rows of a value."""
        dim = parameters_of(scatter, Indexed)["dim"]
        if {*reader.outputs[0].local} != {*value.local}:  # an outer product has more rows
            return False
        if reader.op in _ALONE:
            return True
        if reader.op == "select":  # pads along other dims are zeros for a sum
            choice, kept, blank = reader.inputs
            return kept is value and choice.local.find(dim) is None and self._is_zero(blank)
        if reader.op != "multiply" and (reader.op != "divide" or reader.inputs[0] is not value):
            return False
        others = [other for other in reader.inputs if other is not value]
        if not others:
            return reader.op == "multiply"
        return others[0].local.find(dim) is None

    def _is_zero(self, value: Value) -> bool:
        maker = self.makers.get(value)
        return maker is not None and maker.op == "full" and maker.params["value"] == 0

    def _ends(self, reader: Instruction, value: Value, scatter: Instruction) -> bool:
        """Whether a reader sums over all rows, or adds them to what is in memory, for a result."""
        if reader.op == "sum":
            over, kept = parameters_of(reader, Reduction)["over"], reader.outputs[0].local.names
            in_order = [name for name in scatter.inputs[0].local.names if name in kept]
            return parameters_of(scatter, Indexed)["dim"] in over and in_order == [*kept]
        if reader.op not in ("add", "subtract"):
            return False
        first, second = reader.inputs
        table, (result,) = (first if second is value else second), reader.outputs
        if table is value or (reader.op == "subtract" and table is second):
            return False
        maker = self.makers.get(table)
        in_memory = maker is None or maker.op not in _FUSED
        alike = set(table.local) == set(value.local)
        return alike and in_memory and result in self.results and not self.readers[result]

    def written(self, instruction: Instruction) -> list[Instruction]:
        """Returns what stands for an instruction."""
        scatter = self.scatter_of.get(instruction)
        if scatter is None:
            return [instruction]
        if instruction is scatter:
            return [self._row_sums(scatter)]
        if instruction.op == "sum":
            return [self._sum(instruction, scatter)]
        if any(value in self.results for value in instruction.outputs):
            return self._added(instruction, scatter)
        return self._same(instruction)

    def _row_sums(self, scatter: Instruction) -> Instruction:
        (updates, indices), (table,) = scatter.inputs, scatter.outputs
        dim = parameters_of(scatter, Indexed)["dim"]
        # Each device has the rows of its own part of the dim, and zeros for all others.
        partial = {*table.layout.axes(dim), *table.layout.partial_axes}
        layout = updates.layout.add_partial(sorted(partial - updates.layout.split_axes))
        sums = Value(updates.shape, table.dtype, layout, updates.local)
        places = Value(indices.shape, indices.dtype, indices.layout, indices.local)
        self.sums[table], self.places[scatter] = sums, places
        params = {**scatter.params, "size": table.local.get(dim).size}
        return Instruction("row_sums", scatter.inputs, (sums, places), params, scatter.source)

    def _same(self, instruction: Instruction) -> list[Instruction]:
        """Returns an elementwise instruction on rows; none for another order of dims."""
        (result,) = instruction.outputs
        inputs = tuple(self.sums.get(value, value) for value in instruction.inputs)
        sums = next(self.sums[value] for value in instruction.inputs if value in self.sums)
        if instruction.op == "transpose":
            self.sums[result] = sums
            return []
        self.sums[result] = Value(sums.shape, result.dtype, sums.layout, sums.local)
        return [replace(instruction, inputs=inputs, outputs=(self.sums[result],))]

    def _sum(self, instruction: Instruction, scatter: Instruction) -> Instruction:
        (_, indices), along = scatter.inputs, parameters_of(scatter, Indexed)
        over = [d for d in parameters_of(instruction, Reduction)["over"] if d != along["dim"]]
        over += indices.local.without(along["pairs"]).names
        inputs = (self.sums[instruction.inputs[0]],)
        params = {**instruction.params, "over": tuple(over)}
        return replace(instruction, inputs=inputs, params=params)

    def _added(self, instruction: Instruction, scatter: Instruction) -> list[Instruction]:
        first, second = instruction.inputs
        value, table = (second, first) if second in self.sums else (first, second)
        sums = self.sums[value]
        before = []
        if instruction.op == "subtract":
            minus = Value(sums.shape, sums.dtype, sums.layout, sums.local)
            before = [Instruction("negative", (sums,), (minus,), {}, instruction.source)]
            sums = minus
        inputs = (table, sums, self.places[scatter])
        added = replace(instruction, op="add_rows", inputs=inputs, params=scatter.params)
        return [*before, added]
