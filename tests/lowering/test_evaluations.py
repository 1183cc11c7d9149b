"""What choices share is written once; programs, times and peaks are those of a lone lowering."""

import random
from dataclasses import replace

import jax
import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.layout import Layout
from meshdsl.lowering import lower as lowering
from meshdsl.lowering.choices import USUAL
from meshdsl.lowering.costs import memory as memories
from meshdsl.lowering.costs.simulation import Simulator, step_seconds
from meshdsl.lowering.options import Options

MESH = md.Mesh.parse("data:2,model:2,context:2")
LAYOUTS = (
    "batch:data; d_ff:model; params/embed:data",
    "batch:data; d_ff:model; heads:model; length:model?",
    "batch:data; embed:model; length:context",
    "batch:data; heads:model; length:context; memory_length:context; params/embed:data",
)
FLIPS = {
    "keep": True,
    "share": False,
    "reduce_each": True,
    "again": True,
    "apart": True,
    "joint": False,
    "halves": "batch",
    "context": "gather",
}


@pytest.fixture(scope="module")
def graph():
    """A step of layers with attention, whose gradients are added up over microbatches."""
    batch, length, embed, d_ff = md.dims(batch=8, length=16, embed=32, d_ff=64)
    layers, heads, kv = md.dims(layers=3, heads=4, kv=8)

    def layer(x, w):
        q, k, v = (md.einsum(x, w[name], over="embed") for name in "qkv")
        k, v = (each.rename(length="memory_length") for each in (k, v))
        seen = md.attention(q, k, v, over="memory_length", length="length", features="kv")
        x = x + md.einsum(seen, w["out"], over=["heads", "kv"])
        h = md.gelu(md.einsum(x, w["up"], over="embed"))
        return x + md.einsum(h, w["down"], over="d_ff"), None

    def loss(params, x):
        return md.mean(md.square(md.scan(layer, x, params, dim="layers")[0]))

    def step(params, batches):
        def add(total, x):
            return jax.tree.map(lambda a, b: a + b, total, md.grad(loss)(params, x)), None

        zeros = jax.tree.map(lambda p: p * 0.0, params)
        total, _ = md.scan(add, zeros, batches, dim="microbatch")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    weights = {name: md.spec([layers, embed, heads, kv]) for name in "qkv"}
    weights |= {"out": md.spec([layers, heads, kv, embed])}
    weights |= {"up": md.spec([layers, embed, d_ff]), "down": md.spec([layers, d_ff, embed])}
    x = md.spec([md.Dimension("microbatch", 2), batch, length, embed])
    return md.jit(step).trace(weights, x)


def writer_of(graph, layout, monkeypatch):
    """Returns what writes the program of a choice while time decides about a graph."""
    writers = []

    def decide(write, *rest):
        writers.append(write)
        return write(USUAL), ()

    with monkeypatch.context() as patch:
        patch.setattr(lowering, "decide", decide)
        lowering.lower(graph, MESH, layout, Options(hardware="v5p"))
    return writers[0]


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_changed_choice_has_the_program_time_and_peak_of_a_lone_lowering(
    graph, text, monkeypatch
):
    draw, layout, kind = random.Random(text), Layout.parse(text), hardware("v5p")
    write, simulator = writer_of(graph, layout, monkeypatch), Simulator(kind)
    choice, times = USUAL, {simulator.seconds(write(USUAL).program)}
    for name in draw.sample(sorted(FLIPS), len(FLIPS)):
        choice = replace(choice, **{name: FLIPS[name]})
        program, seconds = write(choice).program, simulator.seconds(write(choice).program)
        peak = program.peak_bytes
        memories._known_peak.cache_clear()
        alone = lowering.lower(graph, MESH, layout, Options(hardware="v5p"), choice=choice)
        assert str(program) == str(alone)
        assert seconds == step_seconds(alone, kind)
        assert peak == alone.peak_bytes
        times.add(seconds)
    assert len(times) > 1


def test_ways_that_plan_alike_are_written_once(graph, monkeypatch):
    write = writer_of(graph, Layout.parse("batch:data; d_ff:model"), monkeypatch)
    assert write(replace(USUAL, share=False)).program is write(USUAL).program
    write = writer_of(graph, Layout.parse(LAYOUTS[1]), monkeypatch)
    assert write(replace(USUAL, share=False)).program is not write(USUAL).program
