"""What a well-formed program is: each rule holds of what is lowered, and is told when broken."""

from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.passes.verify import verify

rows, columns, layers = md.dims(rows=8, columns=4, layers=3)
X = md.spec([rows, columns], "float64")
W = md.spec([layers, columns], "float64")


def function(x, w):
    total, _ = md.scan(lambda c, row: (c * row, None), x, w, dim="layers")
    return md.sum(total, "rows"), x


def lowered():
    return md.jit(function, "data:2", "rows:data", "numpy").lower(X, W)


def with_instructions(program, change):
    block = program.block
    return replace(
        program, block=replace(block, instructions=tuple(change(list(block.instructions))))
    )


def swapped(program, name, **changes):
    """Returns the program with its only instruction of that name changed."""

    def change(instructions):
        (at,) = (n for n, one in enumerate(instructions) if one.op == name)
        instructions[at] = replace(instructions[at], **changes)
        return instructions

    return with_instructions(program, change)


def of(program, op):
    return next(one for one in program.block.instructions if one.op == op)


def told(program):
    with pytest.raises(AssertionError) as caught:
        verify(program)
    return str(caught.value)


def test_what_is_lowered_is_well_formed():
    verify(lowered())


def test_a_value_is_made_before_it_is_read():
    text = told(with_instructions(lowered(), reversed))
    assert "reads a value that is not made before it in its block" in text
    text = told(with_instructions(lowered(), lambda found: found[:-1]))
    assert text == "a block returns a value that it does not make"


def test_a_value_is_made_once():
    text = told(with_instructions(lowered(), lambda found: [*found, found[-1]]))
    assert "is made twice" in text


def test_a_shard_has_the_sizes_that_its_layout_says():
    program = lowered()
    wrong = replace(program.block.inputs[0], layout=TensorLayout())
    block = replace(program.block, inputs=(wrong, program.block.inputs[1]))
    assert "but its layout replicated gives other sizes" in told(replace(program, block=block))


def test_every_end_has_a_path():
    text = told(replace(lowered(), input_paths=(), output_paths=()))
    assert text == (
        "the program does not have a path for each input; "
        "the program does not have a path for each output"
    )


def test_a_body_fits_the_loop_that_runs_it():
    program = lowered()
    body = of(program, "scan").params["body"]
    for changed, problem in (
        ({"outputs": ()}, "has a body for another number of operands or results"),
        ({"outputs": body.inputs[1:2]}, "has carries that change their dims or dtype"),
    ):
        params = {**of(program, "scan").params, "body": replace(body, **changed)}
        assert problem in told(swapped(program, "scan", params=params))
    params = {**of(program, "scan").params, "dim": "columns"}
    assert "has a body for slices of other sizes" in told(swapped(program, "scan", params=params))


def test_a_collective_leaves_the_layout_that_its_kind_does():
    program = lowered()
    reduce = of(program, "all_reduce")
    (value,), (result,) = reduce.inputs, reduce.outputs
    partial = replace(result, layout=value.layout)
    text = told(swapped(program, "all_reduce", outputs=(partial,)))
    assert "leads to replicated, not to replicated (partial sum over data)" in text
    narrow = replace(result, dtype=np.dtype("float32"))
    assert "joins several dtypes" in told(swapped(program, "all_reduce", outputs=(narrow,)))
    assert "does not have a result for each operand" in told(
        swapped(program, "all_reduce", inputs=(value, value))
    )
    params = {"axes": ("data",), "dim": "columns"}
    gather = told(swapped(program, "all_reduce", op="all_gather", params=params))
    assert "does not apply to layout replicated (partial sum over data)" in gather


def test_a_permute_sends_and_receives_once():
    program = md.jit(lambda x: md.flip(x, "rows"), "data:2", "rows:data", "numpy").lower(X)
    permute = of(program, "permute")
    for pairs, problem in (
        (((0, 1), (1, 1)), "sends or receives twice at one device"),
        (((0, 2), (1, 0)), "names devices that the mesh does not have"),
    ):
        changed = swapped(program, "permute", params={**permute.params, "pairs": pairs})
        assert problem in told(changed)
