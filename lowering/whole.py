"""Lowering to one program of whole tensors, each with the layout that the rules give it.

No instruction of such a program is a collective, and every value is local as it is global: a
compiler that partitions programs (XLA's GSPMD) decides what each device holds and sends. What a
value's `layout` says is what that compiler is asked for. So `collectives` is empty, and
`peak_bytes` and `flops` are those of one device that does everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.graphs.lookalikes import lookalikes
from meshdsl.lowering.instructions import kind_of
from meshdsl.lowering.lower import lower, validate
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.lowering.unused import tell
from meshdsl.tracing.graph import Graph


def lower_whole(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options | None = None,
    donated: Sequence[bool] = (),
) -> SpmdProgram:
    """Lowers a traced graph to a program of whole tensors, for a mesh and a layout.

    Arguments and errors are those of `lowering.lower.lower`. Options say how devices send what they
    do, or hold, and so change nothing here.
    """
    validate(graph, mesh, layout)
    program = lower(graph, Mesh(), Layout(), None, donated)
    unused = tuple(_unused(options or DEFAULT))
    notes = (*graph.notes, *lookalikes(graph, layout))
    program = replace(program, unused=unused, partitioner="XLA", notes=notes)
    tell(program, DEFAULT)
    return replace(program, mesh=mesh, layout=layout, block=_Places(mesh, layout).program(program))


def _unused(options: Options) -> Iterator[str]:
    """Yields, in words, the options that ask for something that XLA decides.

    A limit on memory does not: it may be kept all the same.
    """
    for field in fields(Options):
        value = getattr(options, field.name)
        if field.name != "memory" and value != field.default:
            asked = field.name if value is True else f"{field.name}={value}"
            yield f"{asked} changes nothing: on backend jax_auto, XLA decides what is sent and how"


class _Places:
    """Gives every value of a program of whole tensors its layout."""

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.mesh = mesh
        self.layout = layout
        self.known: dict[Value, Value] = {}

    def program(self, program: SpmdProgram) -> Block:
        """Returns the block of a program, whose ends are where their paths put them."""
        block = program.block
        for value, path in zip(block.inputs, program.input_paths, strict=True):
            self.known[value] = self.at(value, path)
        placed = self.block(block)
        outputs, copies = [], []
        for value, path in zip(placed.outputs, program.output_paths, strict=True):
            end = self.at(value, path)
            if end.layout != value.layout:
                copies.append(Instruction("rename", (value,), (end,), {"names": ()}))
            outputs.append(end if end.layout != value.layout else value)
        return Block(placed.inputs, (*placed.instructions, *copies), tuple(outputs))

    def at(self, value: Value, path: str) -> Value:
        """Returns an end of the program where its path puts it; ends have no pads."""
        where = self.layout.assign(value.shape, path).even(value.shape, self.mesh)
        return replace(value, layout=where)

    def value(self, value: Value) -> Value:
        if value not in self.known:
            where = self.layout.inside(value.shape)
            self.known[value] = replace(value, layout=where)
        return self.known[value]

    def block(self, block: Block) -> Block:
        return Block(
            tuple(map(self.value, block.inputs)),
            tuple(map(self.instruction, block.instructions)),
            tuple(map(self.value, block.outputs)),
        )

    def instruction(self, instruction: Instruction) -> Instruction:
        params: dict[str, Any] = {
            name: self.block(held) if isinstance(held, Block) else held
            for name, held in instruction.params.items()
        }
        placed = replace(
            instruction,
            inputs=tuple(map(self.value, instruction.inputs)),
            outputs=tuple(map(self.value, instruction.outputs)),
            params=params,
        )
        if kind_of(instruction.op).scores:
            params["blocks"] = self.blocks_of_scores(placed)
        return placed

    def blocks_of_scores(self, attention: Instruction) -> tuple[int, int]:
        """Returns the rows and columns of scores that are computed at once.

        They are as many as suit one device's share of the scores. A split dim is not cut into
        blocks: each of them would lie on few devices.
        """
        shares = [
            replace(value, local=value.layout.local(value.shape, self.mesh))
            for value in attention.inputs
        ]
        rows, columns = AttentionSizes.of(replace(attention, inputs=tuple(shares))).blocks
        whole = AttentionSizes.of(attention)
        q, k = attention.inputs[:2]
        if q.layout.axes(whole.rows.name):
            rows = whole.rows.size
        if k.layout.axes(whole.columns.name):
            columns = whole.columns.size
        return rows, columns
