"""Nothing is done twice, nothing that no one needs; effects and barriers stay."""

from dataclasses import replace

import numpy as np

import meshdsl as md
from meshdsl.lowering.options import DEFAULT
from meshdsl.lowering.passes.tidy import tidy
from meshdsl.lowering.program import Instruction
from tests.lowering.passes.running import assert_same

rows, columns = md.dims(rows=8, columns=4)
X = md.named(np.random.default_rng(0).normal(size=(8, 4)), [rows, columns])


def lowered(function):
    return md.jit(function, "data:2", "rows:data", "numpy").lower(X)


def doubled(program):
    """Returns the program with every instruction written twice; the results are read in turn."""
    block, found, copies = program.block, [], {}
    for one in block.instructions:
        again = replace(
            one,
            inputs=tuple(copies.get(value, value) for value in one.inputs),
            outputs=tuple(replace(value) for value in one.outputs),
        )
        copies.update(zip(one.outputs, again.outputs, strict=True))
        found += [one, again]
    return replace(program, block=replace(block, instructions=tuple(found)))


def ops(program):
    return [one.op for one in program.block.instructions]


def test_what_no_one_needs_is_dropped():
    program = lowered(lambda x: md.sum(md.exp(x)))
    twice = doubled(program)
    assert ops(tidy(twice, DEFAULT)) == ops(program)


def test_equal_collectives_are_one():
    program = lowered(lambda x: md.sum(x, "rows"))
    (reduce,) = (one for one in program.block.instructions if one.op == "all_reduce")
    copy = replace(reduce.outputs[0])
    again = replace(reduce, outputs=(copy,))
    block = replace(
        program.block,
        instructions=(*program.block.instructions, again),
        outputs=(reduce.outputs[0], copy),
    )
    program = replace(program, block=block, output_paths=("a", "b"))
    tidied = tidy(program, DEFAULT)
    assert ops(tidied).count("all_reduce") == 1
    assert_same(program, tidied, X)


def test_instructions_that_differ_stay():
    program = lowered(lambda x: (md.sum(x, "rows"), md.max(x, "rows"), x * 0.0, x * -0.0))
    assert tidy(program, DEFAULT) is program


def test_effects_stay_and_so_does_what_they_print():
    def function(x):
        md.print("{}", md.sum(x))
        return x * 2

    program = lowered(function)
    assert tidy(program, DEFAULT) is program


def test_barriers_keep_apart_what_is_computed_again():
    program = lowered(lambda x: x)
    (value,) = program.block.inputs
    first, second = (replace(value) for _ in range(2))
    barriers = tuple(Instruction("barrier", (value,), (each,)) for each in (first, second))
    block = replace(program.block, instructions=barriers, outputs=(first, second))
    program = replace(program, block=block, output_paths=("a", "b"))
    assert tidy(program, DEFAULT) is program
