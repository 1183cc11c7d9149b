"""A changed program is simulated from what is known of the one before: to the same seconds."""

import random
from dataclasses import replace

import pytest

import meshdsl as md
from meshdsl.layouts.calibration import find_hardware
from meshdsl.lowering.costs.roofline import local_work, works_alike
from meshdsl.lowering.costs.simulation import Simulator, simulate
from meshdsl.lowering.program import Block
from tests.layouts.calibrations import written


def layer(x, w):
    h = md.gelu(md.einsum(x, w["up"], over="embed"))
    return x + md.einsum(h, w["down"], over="d_ff"), None


def loss(w, x):
    return md.mean(md.square(md.scan(md.checkpoint(layer), x, w, dim="layers")[0]))


@pytest.fixture(scope="module")
def program():
    layers, batch, embed, d_ff = md.dims(layers=4, batch=4096, embed=1024, d_ff=4096)
    layout = "batch:data; d_ff:model; w/embed:data"
    weights = {"up": md.spec([layers, embed, d_ff]), "down": md.spec([layers, d_ff, embed])}
    return md.jit(md.grad(loss), "data:4,model:4", layout).lower(weights, md.spec([batch, embed]))


def changed(block, draw):
    """Returns a block with one instruction repeated or left out, here or in a loop."""
    loops = [at for at, one in enumerate(block.instructions) if one.bodies]
    instructions = list(block.instructions)
    costly = [n for n, one in enumerate(instructions) if one.is_collective or one.op == "einsum"]
    if loops and (not costly or draw.random() < 0.6):
        at = draw.choice(loops)
        loop = instructions[at]
        body = changed(loop.params["body"], draw)
        instructions[at] = replace(loop, params={**loop.params, "body": body})
        return replace(block, instructions=tuple(instructions))
    at = draw.choice(costly)
    again = tuple(replace(value) for value in instructions[at].outputs)
    instructions.insert(at + 1, replace(instructions[at], outputs=again))  # nobody reads it
    read = {v for one in instructions for v in one.inputs} | {*block.outputs}
    unread = [one for one in instructions if read.isdisjoint(one.outputs)]
    if draw.random() < 0.25:
        instructions.remove(draw.choice(unread))  # this one, or one of an earlier change
    return Block(block.inputs, tuple(instructions), block.outputs)


@pytest.mark.parametrize("name", ["v5p", "v4", "h100", "mine.json"])
@pytest.mark.parametrize("seed", range(8))
def test_a_changed_program_takes_what_it_takes_from_nothing(program, name, seed, tmp_path):
    kind = find_hardware(written(tmp_path) if name == "mine.json" else name)
    draw, simulator, times = random.Random(seed), Simulator(kind), set()
    for _ in range(6):
        times.add(simulator.seconds(program))
        assert simulator.seconds(program) == simulate(program, kind).seconds
        program = replace(program, block=changed(program.block, draw))
    assert len(times) > 1


@pytest.mark.parametrize("products", ["within", "least", "alone"])
def test_blocks_that_work_alike_have_the_same_work(program, products):
    draw, found = random.Random(0), set()
    for _ in range(60):
        loops = [one.body for one in program.block.instructions if one.bodies]
        block = draw.choice([program.block, *loops])
        other = changed(block, draw)
        other = Block(other.inputs, other.instructions, draw.choice([other.outputs, ()]))
        works = [local_work(one, products=products) for one in (block, other)]
        for one, two in [(block, other), (other, block)]:
            if works_alike(one, two):
                assert works[0] == works[1]
            found.add((works_alike(one, two), works[0] == works[1]))
    assert found >= {(True, True), (False, False)}


def test_programs_of_two_meshes_do_not_mix(program):
    kind = find_hardware("v5p")
    x = md.spec(md.dims(batch=2**16, embed=64))
    total = md.jit(lambda x: md.sum(x, over="batch"), "data:8", "batch:data")
    simulator = Simulator(kind)
    for one in (program, total.lower(x), program, total.on("data:2", "batch:data").lower(x)):
        assert simulator.seconds(one) == simulate(one, kind).seconds
