"""Verify: whether a program is well formed, whatever passes have made of it.

A pass that breaks a rule told here is wrong; tests ask after every pass. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.collectives import COLLECTIVES
from meshdsl.lowering.instructions import KINDS
from meshdsl.lowering.parameters import Loop, Scan, parameters_of
from meshdsl.lowering.passes.parameter_types import parameter_problems
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value


def verify(program: SpmdProgram) -> None:
    """Checks that a program is well formed: `verify(f.lower(x))`.

    Raises:
        AssertionError: a value is read before it is made, or made twice; a shard has not the shape
            that its layout says; a parameter is missing, unknown or of another type than the record
            of its kind says; a block does not fit the instruction that runs it; or a collective
            leaves another layout than its kind does. Every problem is reported.
    """
    found = list(_problems(program.block, program.mesh, set()))
    if len(program.block.inputs) != len(program.input_paths):
        found.append("the program has not one path for each input")
    if len(program.block.outputs) != len(program.output_paths):
        found.append("the program has not one path for each output")
    assert not found, "; ".join(found)


def _problems(block: Block, mesh: Mesh, seen: set[Value]) -> Iterator[str]:
    """Yields what is wrong in a block; `seen` collects the values of all blocks."""
    here: set[Value] = set()
    for value in block.inputs:
        yield from _made(value, "an input", mesh, seen)
        here.add(value)
    for one in block.instructions:
        own = list(_own_problems(one))
        for problem in own:
            yield f"{one.op} at {one.source} {problem}"
        if any(value not in here for value in one.inputs):
            yield f"{one.op} at {one.source} reads what has not been made in its block"
        for value in one.outputs:
            yield from _made(value, f"a result of {one.op} at {one.source}", mesh, seen)
            here.add(value)
        for body in one.bodies:
            yield from _problems(body, mesh, seen)
        wrong = "" if own else _fits(one, mesh)  # which reads the parameters
        if wrong:
            yield f"{one.op} at {one.source} {wrong}"
    if any(value not in here for value in block.outputs):
        yield "a block returns what it has not made"


def _own_problems(one: Instruction) -> Iterator[str]:
    """Yields what is wrong with the kind of an instruction, or with its parameters."""
    if one.op in KINDS:
        yield from parameter_problems(one)
    else:
        yield "is not declared in lowering/instructions.py or lowering/collectives.py"


def _made(value: Value, what: str, mesh: Mesh, seen: set[Value]) -> Iterator[str]:
    if value in seen:
        yield f"{what} is there already"
    seen.add(value)
    if value.layout.local(value.shape, mesh) != value.local:
        yield f"{what} has {value.local}, where its layout {value.layout} leaves other sizes"


def _fits(one: Instruction, mesh: Mesh) -> str:
    """Returns in what way the operands, results or blocks of an instruction do not fit it."""
    if one.is_collective:
        return _collective_fits(one, mesh)
    return _bodies_fit(one) if one.bodies else ""


def _bodies_fit(one: Instruction) -> str:
    """Returns in what way the blocks of an instruction do not fit it, if in one."""
    if one.op == "cond":
        given = tuple(map(_kind, one.inputs[1:]))
        fits = all(
            tuple(map(_kind, body.inputs)) == given
            and tuple(map(_kind, body.outputs)) == tuple(map(_kind, one.outputs))
            for body in one.bodies
        )
        return "" if fits else "has branches for other operands or results"
    params = parameters_of(one, Loop)
    body, first = params["body"], params["consts"] + params["carries"]
    start, end = one.inputs[params["consts"] : first], one.outputs[: params["carries"]]
    within = body.inputs[params["consts"] : first], body.outputs[: params["carries"]]
    if len(body.inputs) != len(one.inputs) or len(body.outputs) != len(one.outputs):
        return "has a body for another number of operands or results"
    kinds = {tuple((v.local, v.dtype) for v in each) for each in (start, end, *within)}
    if len(kinds) > 1:
        return "has carries that change their kind on the way"
    pairs = list(zip(one.inputs[: params["consts"]], body.inputs, strict=False))
    if any(_kind(outer) != _kind(inner) for outer, inner in pairs):
        return "has consts of another kind inside"
    stacked = [
        *zip(one.inputs[first:], body.inputs[first:], strict=True),
        *zip(one.outputs[params["carries"] :], body.outputs[params["carries"] :], strict=True),
    ]
    if one.op == "scan" and any(
        outer.local.without([parameters_of(one, Scan)["dim"]]) != inner.local
        for outer, inner in stacked
    ):
        return "has slices of other sizes inside"
    return ""


def _kind(value: Value) -> tuple[object, ...]:
    return value.local, value.dtype, value.layout


def _collective_fits(one: Instruction, mesh: Mesh) -> str:
    """Returns in what way a collective is not one, if in one."""
    if len(one.inputs) != len(one.outputs) or len(one.parts) != len(one.inputs):
        return "has not one result for each operand"
    if len({value.dtype for value in (*one.inputs, *one.outputs)}) > 1:
        return "joins several dtypes"
    if len(set(one.inputs)) < len(one.inputs) and one.op == "all_reduce":
        return "moves a tensor twice"
    for part in one.parts:
        (value,), (result,) = part.inputs, part.outputs
        if value.shape != result.shape:
            return f"turns {value.shape} into {result.shape}"
        wrong = COLLECTIVES[part.op].problem(value, result, part.params, mesh)
        if wrong:
            return wrong
    return ""
