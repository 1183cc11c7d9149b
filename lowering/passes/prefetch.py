"""Prefetch: what a loop gathers for an iteration travels while the one before is computed.

A scan whose body gathers slices of what it scans over waits for them in every iteration: XLA:TPU
does not move a gather into the iteration before (it leaves the first of a body exposed). Here the
body gathers the slices of the next iteration, before anything else, and carries them there; those
of the first are gathered before the loop. This holds one more layer of gathered weights, and sends
one gather more than there are iterations: the last one gathers the first slices again. So it is
done on request only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.options import Options
from meshdsl.lowering.parameters import Scan, Window, parameters_of
from meshdsl.lowering.passes.blocks import CHEAP, each_block
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value, joined
from meshdsl.tensors.dims import Dimension, Shape


def prefetch(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Gathers one iteration ahead, if `options.prefetch` asks for it and the memory allows it."""
    if not options.prefetch:
        return program
    found = each_block(program, lambda block: _ahead(block, program.mesh))
    if options.memory is not None and found.peak_bytes > max(options.memory, program.peak_bytes):
        return program
    return found


def _ahead(block: Block, mesh: Mesh) -> Block:
    found: list[Instruction] = []
    for one in block.instructions:
        found += _pipelined(one, mesh) if one.op == "scan" else [one]
    if len(found) == len(block.instructions):
        return block
    return replace(block, instructions=tuple(found))


@dataclass(frozen=True)
class _Gather:
    """A gather that can be done ahead, and how its operands come of the body's inputs.

    Attributes:
        behind: of the results of the body's barriers, what they are. They are looked through: what
            is gathered in another iteration is apart already.
    """

    instruction: Instruction
    chain: tuple[Instruction, ...]
    behind: Mapping[Value, Value]


def _pipelined(scan: Instruction, mesh: Mesh) -> list[Instruction]:
    """Returns a scan that gathers ahead, after what it starts with; or the scan as it is."""
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

    # Before the loop: the slices of the first iteration.
    first = params["length"] - 1 if params["reverse"] else 0
    before: list[Instruction] = []
    given = dict(zip(body.inputs[:consts], scan.inputs[:consts], strict=True))

    def slice_of(value: Value) -> Value:
        if value not in given:
            outer = scan.inputs[body.inputs.index(value)]
            given[value] = _slice(outer, value, dim, first, scan, before)
        return given[value]

    starts = [out for one in gathers for out in _copied(one, slice_of, before)]

    # In the loop: those of the next.
    ahead: dict[Value, Value] = {}
    inside: list[Instruction] = []

    def next_of(value: Value) -> Value:
        if value in body.inputs[:consts]:
            return value
        return ahead.setdefault(value, replace(value))

    following = [out for one in gathers for out in _copied(one, next_of, inside)]
    gone = {one.instruction for one in gathers}
    carried = tuple(out for one in gathers for out in one.instruction.outputs)
    rest = [part for one in body.instructions for part in _without(one, gone, mesh)]
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
    ends = tuple(replace(value) for value in starts)
    outputs = (*scan.outputs[: params["carries"]], *ends, *scan.outputs[params["carries"] :])
    return [*before, replace(scan, inputs=inputs, outputs=outputs, params=changed)]


def _gathers(body: Block, consts: int, fixed: int, mesh: Mesh) -> Iterator[_Gather]:
    """Yields the gathers, of joined ones the parts, that need nothing that the body computes."""
    maker = {value: one for one in body.instructions for value in one.outputs}
    behind = {
        after: before
        for one in body.instructions
        if one.op == "barrier"
        for before, after in zip(one.inputs, one.outputs, strict=True)
    }
    given, slices = set(body.inputs[:consts]), set(body.inputs[fixed:])
    for one in body.instructions:
        if one.op != "all_gather":
            continue
        parts = [
            (part, _chain(part.inputs[0], maker, behind, given | slices)) for part in one.parts
        ]
        found = [(part, chain) for part, chain in parts if chain is not None]
        instructions = dict.fromkeys(step for _, chain in found for step in chain)
        readers = [*(part for part, _ in found), *instructions]
        reads = {_before(value, behind) for reader in readers for value in reader.inputs}
        if found and reads & slices:
            chosen = one if len(found) == len(parts) else joined([p for p, _ in found], mesh)
            order = tuple(step for step in body.instructions if step in instructions)
            yield _Gather(chosen, order, behind)


def _before(value: Value, behind: Mapping[Value, Value]) -> Value:
    """Returns what a value is before all barriers."""
    while value in behind:
        value = behind[value]
    return value


def _chain(
    value: Value,
    maker: Mapping[Value, Instruction],
    behind: Mapping[Value, Value],
    ends: set[Value],
) -> tuple[Instruction, ...] | None:
    """Returns the instructions that make a value of some others, if they are cheap."""
    value = _before(value, behind)
    if value in ends:
        return ()
    one = maker.get(value)
    if one is None or one.op not in CHEAP:
        return None
    found: tuple[Instruction, ...] = ()
    for operand in one.inputs:
        before = _chain(operand, maker, behind, ends)
        if before is None:
            return None
        found += before
    return (*found, one)


def _copied(
    gather: _Gather, given: Callable[[Value], Value], written: list[Instruction]
) -> Sequence[Value]:
    """Writes a gather, and what leads to it, of other inputs; returns what it gathers."""
    made: dict[Value, Value] = {}

    def of(value: Value) -> Value:
        value = _before(value, gather.behind)
        return made[value] if value in made else given(value)

    for one in (*gather.chain, gather.instruction):
        outputs = tuple(replace(value) for value in one.outputs)
        written.append(replace(one, inputs=tuple(map(of, one.inputs)), outputs=outputs))
        made.update(zip(one.outputs, outputs, strict=True))
    return outputs


def _without(one: Instruction, gone: set[Instruction], mesh: Mesh) -> Iterator[Instruction]:
    """Yields what is left of an instruction without the gathers that are done ahead."""
    if one.op != "all_gather":
        yield one
        return
    done = {value for gather in gone for value in gather.outputs}
    left = [part for part in one.parts if part.outputs[0] not in done]
    if len(left) == len(one.parts):
        yield one
    elif left:
        yield joined(left, mesh)


def _slice(
    stacked: Value, like: Value, dim: str, at: int, scan: Instruction, written: list[Instruction]
) -> Value:
    """Writes what cuts one slice out of a stack before a loop."""
    order = stacked.shape.names
    shape = Shape(Dimension(dim, 1) if d.name == dim else d for d in stacked.shape)
    local = Shape(Dimension(dim, 1) if d.name == dim else d for d in stacked.local)
    thin = Value(shape, stacked.dtype, stacked.layout, local)
    params: Window = {"dim": dim, "start": at, "stride": 1, "dilation": 1, "fill": 0}
    written.append(Instruction("window", (stacked,), (thin,), params, scan.source))
    names = [name for name in order if name != dim]
    kept = Value(
        Shape(shape.get(name) for name in names),
        stacked.dtype,
        stacked.layout,
        Shape(local.get(name) for name in names),
    )
    written.append(Instruction("reshape", (thin,), (kept,), {}, scan.source))
    if kept.shape.names == like.shape.names:
        return kept
    result = replace(like)
    written.append(Instruction("transpose", (kept,), (result,), {}, scan.source))
    return result
