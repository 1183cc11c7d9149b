"""Several runs of a program as one, so that the host calls the devices less often.

The state that the runs pass on (a training state) has the same paths as input and as output. All
other inputs have a slice for every run along a dim `steps`; all other outputs are stacked along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.tensors.dims import STEPS, Dimension, Shape


def repeated(program: SpmdProgram, count: int, carried: Sequence[str]) -> SpmdProgram:
    """Returns a program that runs another one `count` times.

    Args:
        carried: paths of inputs, each of which an output replaces for the next run.

    Raises:
        ValueError: a carried output is missing, or differs from its input in shape, dtype or
            layout; or the program has a dim `steps`. The message lists all problems.
    """
    block, dim, passed = program.block, Dimension(STEPS, count), set(carried)
    outputs_by_path = dict(zip(program.output_paths, range(len(block.outputs)), strict=True))
    problems = []
    pairs: list[tuple[int, int]] = []  # the numbers of an input and of the output that replaces it
    for number, (path, value) in enumerate(zip(program.input_paths, block.inputs, strict=True)):
        if path not in passed:
            continue
        if path not in outputs_by_path:
            problems.append(f"`{path}` is donated, but no result has this path")
        elif not _same(value, block.outputs[outputs_by_path[path]]):
            problems.append(f"`{path}` comes back with another shape, dtype or layout")
        else:
            pairs.append((number, outputs_by_path[path]))
    sliced = [n for n, path in enumerate(program.input_paths) if path not in passed]
    replacing = {end for _, end in pairs}
    rest = [n for n in range(len(block.outputs)) if n not in replacing]
    named = [*(block.inputs[n] for n in sliced), *(block.outputs[n] for n in rest)]
    if any(value.shape.find(STEPS) for value in named):
        problems.append(f"the program has a dim `{STEPS}` of its own; give it another name")
    if problems:
        raise ValueError(
            "\n  ".join([f"{program.name} cannot run {count} times in one call:", *problems])
        )
    starts, ends_in = [n for n, _ in pairs], [n for _, n in pairs]
    body = Block(
        tuple(block.inputs[n] for n in (*starts, *sliced)),
        block.instructions,
        tuple(block.outputs[n] for n in (*ends_in, *rest)),
    )
    stacked = set(sliced)
    inputs = [_stack(v, dim) if n in stacked else replace(v) for n, v in enumerate(block.inputs)]
    outputs = [
        replace(v) if n in replacing else _stack(v, dim) for n, v in enumerate(block.outputs)
    ]
    loop = Instruction(
        "scan",
        tuple(inputs[n] for n in (*starts, *sliced)),
        tuple(outputs[n] for n in (*ends_in, *rest)),
        {
            "body": body,
            "length": count,
            "dim": STEPS,
            "consts": 0,
            "carries": len(pairs),
            "reverse": False,
        },
    )
    return replace(program, block=Block(tuple(inputs), (loop,), tuple(outputs)))


def _same(value: Value, other: Value) -> bool:
    return (value.shape, value.dtype, value.layout) == (other.shape, other.dtype, other.layout)


def _stack(value: Value, dim: Dimension) -> Value:
    """Returns a value for every run, stacked along a dim that is not split."""
    return replace(value, shape=Shape([dim, *value.shape]), local=Shape([dim, *value.local]))
