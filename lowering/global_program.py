"""Global programs: lowering to a program of global tensors, each with the layout of the rules.

A compiler that partitions programs (XLA's GSPMD) decides which shard each device has, and what it
sends. A value's `layout` is a request to that compiler. So the program has no collectives, the
local shape of a value is its global shape, and `peak_bytes` and `flops` are those of a single
device that runs everything.
"""

from __future__ import annotations

import itertools
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
from meshdsl.lowering.pipelining.finding import stacks_of
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.lowering.unused import warn_of_options, warn_of_rules
from meshdsl.tracing.graph import Graph


def lower_global(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options | None = None,
    donated: Sequence[bool] = (),
) -> SpmdProgram:
    """Lowers a traced graph to a program of global tensors, for a mesh and a layout.

    Arguments and errors are those of `lowering.lower.lower`. Options are about what devices send
    and keep, and so have no effect here.
    """
    validate(graph, mesh, layout)
    split = layout.on(mesh)
    program = lower(graph, Mesh(), Layout(), None, donated)
    unused = tuple(_unused(options or DEFAULT))
    no_pipeline = tuple(_no_pipeline(graph, mesh, layout))
    notes = (*graph.notes, *lookalikes(graph, split), *no_pipeline)
    program = replace(program, unused=unused, partitioner="XLA", notes=notes)
    warn_of_options(program, DEFAULT)
    if options is None or options.pipeline != "none":  # else the user knows
        warn_of_rules(no_pipeline)
    return replace(program, mesh=mesh, layout=layout, block=_Placer(mesh, split).program(program))


def _no_pipeline(graph: Graph, mesh: Mesh, layout: Layout) -> Iterator[str]:
    """Yields the note about layers that other backends would compute as a pipeline."""
    for stack in itertools.islice(stacks_of(graph, layout, mesh), 1):
        yield (
            f"`{stack.rule}` makes no pipeline on backend jax_auto: XLA gathers the layers, and "
            "all devices compute all of them. The backends jax and tf have pipelines"
        )


def _unused(options: Options) -> Iterator[str]:
    """Yields messages about options for what XLA decides.

    A limit on memory is none of them: the program may keep it nevertheless. Neither is
    `pipeline=none`: there are no pipelines here.
    """
    for field in fields(Options):
        value = getattr(options, field.name)
        kept = field.name == "memory" or (field.name, value) == ("pipeline", "none")
        if not kept and value != field.default:
            asked = field.name if value is True else f"{field.name}={value}"
            yield f"{asked} changes nothing: on backend jax_auto, XLA decides what is sent and how"


class _Placer:
    """Gives every value of a global program its layout.

    Attributes:
        known: the values that have got their layouts, by the values without.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.mesh = mesh
        self.layout = layout
        self.known: dict[Value, Value] = {}

    def program(self, program: SpmdProgram) -> Block:
        """Returns the block of a program; inputs and outputs have the layouts of their paths."""
        block = program.block
        for value, path in zip(block.inputs, program.input_paths, strict=True):
            self.known[value] = self.stored(value, path)
        placed = self.block(block)
        outputs, copies = [], []
        for value, path in zip(placed.outputs, program.output_paths, strict=True):
            output = self.stored(value, path)
            if output.layout != value.layout:
                copies.append(Instruction("rename", (value,), (output,), {"names": ()}))
            outputs.append(output if output.layout != value.layout else value)
        return Block(placed.inputs, (*placed.instructions, *copies), tuple(outputs))

    def stored(self, value: Value, path: str) -> Value:
        """Returns an input or output with the layout of its path, without splits that need pads."""
        layout = self.layout.assign(value.shape, path).even(value.shape, self.mesh)
        return replace(value, layout=layout)

    def value(self, value: Value) -> Value:
        if value not in self.known:
            self.known[value] = replace(value, layout=self.layout.inside(value.shape))
        return self.known[value]

    def block(self, block: Block) -> Block:
        return Block(
            tuple(map(self.value, block.inputs)),
            tuple(map(self.instruction, block.instructions)),
            tuple(map(self.value, block.outputs)),
        )

    def instruction(self, instruction: Instruction) -> Instruction:
        params: dict[str, Any] = {
            name: self.block(param) if isinstance(param, Block) else param
            for name, param in instruction.params.items()
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

        They suit one device's shard of the scores. A split dim is not divided into blocks: each
        block would be on a few devices only.
        """
        shards = [
            replace(value, local=value.layout.local(value.shape, self.mesh))
            for value in attention.inputs
        ]
        local = AttentionSizes.of(replace(attention, inputs=tuple(shards)))
        rows, columns = local.blocks_of(local.lead.volume)
        sizes = AttentionSizes.of(attention)
        q, k = attention.inputs[:2]
        if q.layout.axes(sizes.rows.name):
            rows = sizes.rows.size
        if k.layout.axes(sizes.columns.name):
            columns = sizes.columns.size
        return rows, columns
