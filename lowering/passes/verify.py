"""Verify: checks that a program is well formed, without running it.

Tests verify the program after every pass; a pass that breaks a rule is wrong.
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
        AssertionError: a value is read before it is made, or made twice; the shape of a shard does
            not follow from its layout; a parameter is missing, unknown or of another type than in
            the record of its kind; a block does not fit the instruction that runs it; or the result
            of a collective has another layout than its kind gives. It lists all problems.
    """
    problems = list(_problems(program.block, program.mesh, set()))
    if len(program.block.inputs) != len(program.input_paths):
        problems.append("the program does not have a path for each input")
    if len(program.block.outputs) != len(program.output_paths):
        problems.append("the program does not have a path for each output")
    assert not problems, "; ".join(problems)


def _problems(block: Block, mesh: Mesh, seen: set[Value]) -> Iterator[str]:
    """Yields the problems of a block; `seen` collects the values of all blocks."""
    here: set[Value] = set()
    for value in block.inputs:
        yield from _made(value, "an input", mesh, seen)
        here.add(value)
    for instruction in block.instructions:
        where = f"{instruction.op} at {instruction.source}"
        own = list(_own_problems(instruction))
        for problem in own:
            yield f"{where} {problem}"
        if any(value not in here for value in instruction.inputs):
            yield f"{where} reads a value that is not made before it in its block"
        for value in instruction.outputs:
            yield from _made(value, f"a result of {where}", mesh, seen)
            here.add(value)
        for body in instruction.bodies:
            yield from _problems(body, mesh, seen)
        # The other checks read the parameters, so these must be right.
        problem = "" if own else _misfit(instruction, mesh)
        if problem:
            yield f"{where} {problem}"
    if any(value not in here for value in block.outputs):
        yield "a block returns a value that it does not make"


def _own_problems(instruction: Instruction) -> Iterator[str]:
    """Yields the problems of an instruction's kind and of its parameters."""
    if instruction.op in KINDS:
        yield from parameter_problems(instruction)
    else:
        yield "is not declared in lowering/instructions.py or lowering/collectives.py"


def _made(value: Value, role: str, mesh: Mesh, seen: set[Value]) -> Iterator[str]:
    if value in seen:
        yield f"{role} is made twice"
    seen.add(value)
    if value.layout.local(value.shape, mesh) != value.local:
        yield f"{role} has {value.local}, but its layout {value.layout} gives other sizes"


def _misfit(instruction: Instruction, mesh: Mesh) -> str:
    """Returns why operands, results or blocks do not fit an instruction; empty if they do."""
    if instruction.is_collective:
        return _collective_misfit(instruction, mesh)
    return _body_misfit(instruction) if instruction.bodies else ""


def _body_misfit(instruction: Instruction) -> str:
    """Returns why the blocks of an instruction do not fit it; empty if they do."""
    if instruction.op == "cond":
        given = tuple(map(_kind, instruction.inputs[1:]))
        fits = all(
            tuple(map(_kind, body.inputs)) == given
            and tuple(map(_kind, body.outputs)) == tuple(map(_kind, instruction.outputs))
            for body in instruction.bodies
        )
        return "" if fits else "has branches for other operands or results"
    params = parameters_of(instruction, Loop)
    body, first = params["body"], params["consts"] + params["carries"]
    initial, final = (
        instruction.inputs[params["consts"] : first],
        instruction.outputs[: params["carries"]],
    )
    inner = body.inputs[params["consts"] : first], body.outputs[: params["carries"]]
    if len(body.inputs) != len(instruction.inputs) or len(body.outputs) != len(instruction.outputs):
        return "has a body for another number of operands or results"
    kinds = {tuple((v.local, v.dtype) for v in carries) for carries in (initial, final, *inner)}
    if len(kinds) > 1:
        return "has carries that change their dims or dtype"
    pairs = list(zip(instruction.inputs[: params["consts"]], body.inputs, strict=False))
    if any(_kind(outer) != _kind(inner) for outer, inner in pairs):
        return "has a body for other consts"
    stacked = [
        *zip(instruction.inputs[first:], body.inputs[first:], strict=True),
        *zip(
            instruction.outputs[params["carries"] :], body.outputs[params["carries"] :], strict=True
        ),
    ]
    if instruction.op == "scan" and any(
        outer.local.without([parameters_of(instruction, Scan)["dim"]]) != inner.local
        for outer, inner in stacked
    ):
        return "has a body for slices of other sizes"
    return ""


def _kind(value: Value) -> tuple[object, ...]:
    return value.local, value.dtype, value.layout


def _collective_misfit(instruction: Instruction, mesh: Mesh) -> str:
    """Returns why operands and results do not fit a collective; empty if they do."""
    if len(instruction.inputs) != len(instruction.outputs) or len(instruction.parts) != len(
        instruction.inputs
    ):
        return "does not have a result for each operand"
    if len({value.dtype for value in (*instruction.inputs, *instruction.outputs)}) > 1:
        return "joins several dtypes"
    if len(set(instruction.inputs)) < len(instruction.inputs) and instruction.op == "all_reduce":
        return "moves a tensor twice"
    for part in instruction.parts:
        (value,), (result,) = part.inputs, part.outputs
        if value.shape != result.shape:
            return f"changes {value.shape} to {result.shape}"
        problem = COLLECTIVES[part.op].problem(value, result, part.params, mesh)
        if problem:
            return problem
    return ""
