"""Prefetch: a loop gathers the weights of the next iteration while it computes the present one.

A scan whose body gathers slices of its inputs waits for them in every iteration: XLA:TPU does not
move a gather into the previous iteration (nothing hides the first gather of a body). With this pass
the body first gathers the slices of the next iteration, and carries them there. Those of the first
are gathered before the loop. This needs memory for one more layer of gathered weights, and one more
gather: the last iteration gathers the first slices again. So it is done only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.parameters import Scan, Window, parameters_of
from meshdsl.lowering.passes.blocks import CHEAP, each_block
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value, joined
from meshdsl.tensors.dims import Dimension, Shape


def prefetch(program: SpmdProgram) -> SpmdProgram:
    """Returns a program whose loops gather one iteration ahead; itself if none can."""
    return each_block(program, lambda block: _ahead(block, program.mesh))


def _ahead(block: Block, mesh: Mesh) -> Block:
    instructions: list[Instruction] = []
    for instruction in block.instructions:
        instructions += _pipelined(instruction, mesh) if instruction.op == "scan" else [instruction]
    if len(instructions) == len(block.instructions):
        return block
    return replace(block, instructions=tuple(instructions))


@dataclass(frozen=True)
class _Gather:
    """A gather that can be done ahead, and the instructions that make its operands.

    Attributes:
        chain: the instructions that make its operands from the body's inputs.
        behind: for each result of the body's barriers, its operand. Barriers are not needed here: a
            gather in another iteration is separate already.
    """

    instruction: Instruction
    chain: tuple[Instruction, ...]
    behind: Mapping[Value, Value]


def _pipelined(scan: Instruction, mesh: Mesh) -> list[Instruction]:
    """Returns a scan that gathers ahead, after its first gathers; or the scan unchanged."""
    params = parameters_of(scan, Scan)
    body = params["body"]
    consts, fixed = params["consts"], params["consts"] + params["carries"]
    dim, stacked = params["dim"], scan.inputs[fixed:]
    own = any(value.layout.axes(dim) for value in (*stacked, *scan.outputs[params["carries"] :]))
    if own or params["length"] < 2 or "ahead" in params:
        return [scan]
    gathers = list(_gathers(body, consts, fixed, mesh))
    if not gathers:
        return [scan]

    # Before the loop: gathers of the first iteration.
    first = params["length"] - 1 if params["reverse"] else 0
    before: list[Instruction] = []
    known = dict(zip(body.inputs[:consts], scan.inputs[:consts], strict=True))

    def slice_of(value: Value) -> Value:
        if value not in known:
            outer = scan.inputs[body.inputs.index(value)]
            known[value] = _slice(outer, value, dim, first, scan, before)
        return known[value]

    starts = [out for gather in gathers for out in _copied(gather, slice_of, before)]

    # In the loop: gathers of the next iteration.
    ahead: dict[Value, Value] = {}
    inside: list[Instruction] = []

    def next_of(value: Value) -> Value:
        if value in body.inputs[:consts]:
            return value
        return ahead.setdefault(value, replace(value))

    following = [out for gather in gathers for out in _copied(gather, next_of, inside)]
    replaced = {gather.instruction for gather in gathers}
    carried = tuple(out for gather in gathers for out in gather.instruction.outputs)
    rest = [
        part for instruction in body.instructions for part in _without(instruction, replaced, mesh)
    ]
    inner = Block(
        (*body.inputs[:fixed], *carried, *body.inputs[fixed:], *ahead.values()),
        (*inside, *rest),
        (*body.outputs[: params["carries"]], *following, *body.outputs[params["carries"] :]),
    )
    again = tuple(scan.inputs[body.inputs.index(value)] for value in ahead)
    count = len(stacked)
    changed: Scan = {
        **params,
        "body": inner,
        "carries": params["carries"] + len(carried),
        "ahead": tuple(range(count, count + len(again))),
    }
    inputs = (*scan.inputs[:fixed], *starts, *stacked, *again)
    last_slices = tuple(replace(value) for value in starts)
    outputs = (*scan.outputs[: params["carries"]], *last_slices, *scan.outputs[params["carries"] :])
    return [*before, replace(scan, inputs=inputs, outputs=outputs, params=changed)]


def _gathers(body: Block, consts: int, fixed: int, mesh: Mesh) -> Iterator[_Gather]:
    """Yields the gathers, or parts of joined gathers, that need no product of the body."""
    maker = {
        value: instruction for instruction in body.instructions for value in instruction.outputs
    }
    behind = {
        after: before
        for instruction in body.instructions
        if instruction.op == "barrier"
        for before, after in zip(instruction.inputs, instruction.outputs, strict=True)
    }
    constants, slices = set(body.inputs[:consts]), set(body.inputs[fixed:])
    for instruction in body.instructions:
        if instruction.op != "all_gather":
            continue
        parts = [
            (part, _chain(part.inputs[0], maker, behind, constants | slices))
            for part in instruction.parts
        ]
        ahead = [(part, chain) for part, chain in parts if chain is not None]
        instructions = dict.fromkeys(step for _, chain in ahead for step in chain)
        readers = [*(part for part, _ in ahead), *instructions]
        reads = {_before(value, behind) for reader in readers for value in reader.inputs}
        if ahead and reads & slices:
            chosen = (
                instruction if len(ahead) == len(parts) else joined([p for p, _ in ahead], mesh)
            )
            order = tuple(step for step in body.instructions if step in instructions)
            yield _Gather(chosen, order, behind)


def _before(value: Value, behind: Mapping[Value, Value]) -> Value:
    """Returns the value before all barriers."""
    while value in behind:
        value = behind[value]
    return value


def _chain(
    value: Value,
    maker: Mapping[Value, Instruction],
    behind: Mapping[Value, Value],
    sources: set[Value],
) -> tuple[Instruction, ...] | None:
    """Returns the instructions that make a value from `sources`, or None if one is not cheap."""
    value = _before(value, behind)
    if value in sources:
        return ()
    instruction = maker.get(value)
    if instruction is None or instruction.op not in CHEAP:
        return None
    steps: tuple[Instruction, ...] = ()
    for operand in instruction.inputs:
        before = _chain(operand, maker, behind, sources)
        if before is None:
            return None
        steps += before
    return (*steps, instruction)


def _copied(
    gather: _Gather, value_of: Callable[[Value], Value], written: list[Instruction]
) -> Sequence[Value]:
    """Writes a gather and its chain with other inputs; returns the gathered values."""
    made: dict[Value, Value] = {}

    def of(value: Value) -> Value:
        value = _before(value, gather.behind)
        return made[value] if value in made else value_of(value)

    for instruction in (*gather.chain, gather.instruction):
        outputs = tuple(replace(value) for value in instruction.outputs)
        written.append(
            replace(instruction, inputs=tuple(map(of, instruction.inputs)), outputs=outputs)
        )
        made.update(zip(instruction.outputs, outputs, strict=True))
    return outputs


def _without(
    instruction: Instruction, gathers: set[Instruction], mesh: Mesh
) -> Iterator[Instruction]:
    """Yields an instruction without its gathers that are done ahead."""
    if instruction.op != "all_gather":
        yield instruction
        return
    done = {value for gather in gathers for value in gather.outputs}
    left = [part for part in instruction.parts if part.outputs[0] not in done]
    if len(left) == len(instruction.parts):
        yield instruction
    elif left:
        yield joined(left, mesh)


def _slice(
    stacked: Value,
    like: Value,
    dim: str,
    position: int,
    scan: Instruction,
    written: list[Instruction],
) -> Value:
    """Writes the instructions that slice a stack before a loop."""
    order = stacked.shape.names
    shape = Shape(Dimension(dim, 1) if d.name == dim else d for d in stacked.shape)
    local = Shape(Dimension(dim, 1) if d.name == dim else d for d in stacked.local)
    thin = Value(shape, stacked.dtype, stacked.layout, local)
    params: Window = {"dim": dim, "start": position, "stride": 1, "dilation": 1, "fill": 0}
    written.append(Instruction("window", (stacked,), (thin,), params, scan.source))
    names = [name for name in order if name != dim]
    thinned = Value(
        Shape(shape.get(name) for name in names),
        stacked.dtype,
        stacked.layout,
        Shape(local.get(name) for name in names),
    )
    written.append(Instruction("reshape", (thin,), (thinned,), {}, scan.source))
    if thinned.shape.names == like.shape.names:
        return thinned
    result = replace(like)
    written.append(Instruction("transpose", (thinned,), (result,), {}, scan.source))
    return result
