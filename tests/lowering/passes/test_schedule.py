"""When collectives begin: reductions where their operands are ready, gathers a product ahead."""

from dataclasses import replace

import numpy as np

import meshdsl as md
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.passes.blocks import in_order
from meshdsl.lowering.passes.schedule import schedule
from tests.lowering.passes.running import assert_same

RNG = np.random.default_rng(0)
APART = Options(bucket_bytes=0)


def array(**dims):
    return md.named(RNG.normal(size=tuple(dims.values())), list(md.dims(**dims)))


def late(program):
    """Returns the program with every instruction as late as its readers allow."""
    block = program.block
    place = {one: n for n, one in enumerate(block.instructions)}
    first: dict = {}
    for one in reversed(block.instructions):
        at = min((first[v] for v in one.outputs if v in first), default=len(place))
        place[one] = at - 0.5
        for value in one.inputs:
            first[value] = min(first.get(value, at), at - 0.5)
    instructions = in_order(block.instructions, place)
    return replace(program, block=replace(block, instructions=instructions))


def ops(program, *kinds):
    return [one.op for one in program.block.instructions if one.op in kinds]


def test_a_reduction_begins_where_its_operand_is_ready():
    def function(x, w):
        total = md.einsum(x, w, over="batch")
        other = md.tanh(md.einsum(x, x.rename(embed="e2"), over="batch"))
        return md.sum(other), total

    inputs = array(batch=8, embed=4), array(batch=8, d_ff=3)
    program = late(md.jit(function, "data:2", "batch:data", "numpy", options=APART).lower(*inputs))
    found = schedule(program, DEFAULT)
    assert ops(found, "einsum", "all_reduce")[:4] == ["einsum", "all_reduce"] * 2
    assert_same(program, found, inputs)


def test_a_gather_begins_before_the_product_before_its_reader():
    def function(x, w_1, w_2, w_3):
        for w in (w_1, w_2, w_3):
            x = md.tanh(md.einsum(x, w, over="embed").rename(next="embed"))
        return x

    inputs = array(batch=8, embed=4), *(array(embed=4, next=4) for _ in range(3))
    layout = "batch:data; params/next:data; next:data?"
    program = md.jit(function, "data:2", layout, "numpy", options=APART).lower(*inputs)
    found = schedule(late(program), Options(memory=10**6))
    assert ops(found, "einsum", "all_gather") == ["all_gather"] * 2 + [
        "einsum",
        "all_gather",
        "einsum",
        "einsum",
    ]
    assert_same(program, found, inputs)


def test_gathers_stay_where_the_peak_would_grow():
    def function(x, w_1, w_2):
        for w in (w_1, w_2):
            x = md.tanh(md.einsum(x, w, over="embed").rename(next="embed"))
        return x

    inputs = array(batch=2, embed=64), *(array(embed=64, next=64) for _ in range(2))
    program = md.jit(function, "data:2", "batch:data; next:data?", "numpy", options=APART)
    program = late(program.lower(*inputs))
    order = ["all_gather", "einsum"] * 2
    assert ops(program, "einsum", "all_gather") == order
    held = schedule(program, DEFAULT)
    assert ops(held, "einsum", "all_gather") == order and held.peak_bytes <= program.peak_bytes
    free = schedule(program, Options(memory=10**6))
    assert ops(free, "einsum", "all_gather") == ["all_gather"] * 2 + ["einsum"] * 2
    assert free.peak_bytes > program.peak_bytes


def test_a_gather_that_leads_to_a_gather_goes_no_further_ahead_than_that():
    def function(x, y, z):
        before = md.einsum(y, z, over="embed")
        scaled = md.sin(md.cos(before))
        product = md.einsum(scaled, z, over="next")
        other = md.rename(x, rows="other", columns="more")  # whole: two gathers, one of the other
        return md.sum(product) + md.sum(other * md.rename(other, other="more", more="other"))

    inputs = array(rows=4, columns=4), array(batch=8, embed=4), array(embed=4, next=4)
    layout = "rows:data; columns:model"
    program = md.jit(function, "data:2,model:2", layout, "numpy", options=APART).lower(*inputs)
    found = schedule(program, Options(memory=10**6))
    order = ops(found, "einsum", "sin", "all_gather")
    assert order == ["einsum", "sin", "all_gather", "all_gather", "einsum"]
    assert schedule(found, Options(memory=10**6)) is found
    assert_same(program, found, inputs)


def test_prints_keep_their_order():
    def function(x):
        md.print("first {}", md.sum(x))
        md.print("second {}", md.sum(x * x))
        return md.sum(x, "batch")

    program = md.jit(function, "data:2", "batch:data", "numpy").lower(array(batch=4, embed=3))
    texts = [one.params for one in program.block.instructions if one.op == "print"]
    again = schedule(late(program), DEFAULT)
    assert [one.params for one in again.block.instructions if one.op == "print"] == texts
