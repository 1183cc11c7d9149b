"""What a checkpoint computes again waits for the gradient that needs it, and joins nothing else.

Stacks of equal layers in four forms: each layer a checkpoint of its own, pairs of checkpoints in a
checkpoint, a scan, and half of the layers scanned.
"""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import lowered

LAYERS = 6
FORMS = ("unrolled", "nested", "scanned", "partly scanned")
TENSOR = ("model:4", "d_ff:model")
DATA = ("data:4", "batch:data")


def layer(x, w):
    """A layer as Megatron splits it: two products with one sum over devices behind them, twice."""
    for first, second in (("a", "b"), ("c", "d")):
        h = md.tanh(md.einsum(md.tanh(x), w[first], over="embed"))
        x = x + md.einsum(h, w[second], over="d_ff")
    return x


def run(form, wrap, ws, x):
    """Returns the stream after all layers; `wrap` makes checkpoints of them."""
    if form == "unrolled":
        return functools.reduce(lambda x, w: wrap(layer)(x, w), ws, x)
    if form == "nested":
        pairs = zip(ws[::2], ws[1::2], strict=True)

        def pair(x, one, other):
            return wrap(layer)(wrap(layer)(x, one), other)

        return functools.reduce(lambda x, both: wrap(pair)(x, *both), pairs, x)
    first, rest = ws
    x = functools.reduce(lambda x, w: wrap(layer)(x, w), first, x)
    return md.scan(lambda x, w: (wrap(layer)(x, w), None), x, rest, dim="layers")[0]


def arguments(form, batch=64, embed=8, d_ff=64, layers=LAYERS, make=None, dtype="float64"):
    """Returns the weights of a stack, and what goes into it."""
    rng = np.random.default_rng(0)

    def random(*dims):
        return md.named(rng.normal(size=[d.size for d in dims]).astype(dtype) / 4, list(dims))

    make = make or random
    rows, width, wide = md.dims(batch=batch, embed=embed, d_ff=d_ff)

    def weights(*lead):
        return {
            name: make(*lead, *((width, wide) if name in "ac" else (wide, width)))
            for name in "abcd"
        }

    alone = {"scanned": 0, "partly scanned": layers // 2}.get(form, layers)
    ws = [weights() for _ in range(alone)]
    if alone < layers:
        ws = ws, weights(md.Dimension("layers", layers - alone))
    return ws, make(rows, width)


def gradients(form, wrap, times=1.0):
    """Returns a function from weights and input to the loss and the gradients of the weights.

    The loss has a slope that is computed, so that it arrives after all of the forward pass.
    """

    def loss(ws, x):
        return md.sum(md.square(run(form, wrap, ws, x))) * times

    return lambda ws, x: md.value_and_grad(loss)(ws, x)


def kept(function):
    return function


def program(form, wrap, mesh, layout, **sizes):
    args = arguments(form, make=lambda *dims: md.spec(list(dims)), **sizes)
    return md.jit(gradients(form, wrap), mesh, layout).lower(*args)


def beyond(found):
    """Returns the bytes at the peak that are neither inputs nor gradients."""
    return sum(
        buffer.bytes
        for buffer in found.memory.buffers
        if buffer.value.local.find("batch") is not None
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mesh", "layout"), [TENSOR, DATA, ("data:4", "params/embed:data")])
def test_numbers_stay_the_same(form, mesh, layout):
    args = arguments(form, batch=8, embed=4, d_ff=8)
    layout = layout.replace("params", "ws")
    again = md.jit(gradients(form, md.checkpoint), mesh, layout, "numpy")(*args)
    expected = md.jit(gradients("unrolled" if form == "nested" else form, kept), backend="numpy")
    for mine, want in zip(jax.tree.leaves(again), jax.tree.leaves(expected(*args)), strict=True):
        scale = np.abs(np.asarray(want)).max()
        np.testing.assert_allclose(np.asarray(mine) / scale, np.asarray(want) / scale, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mesh", "layout"), [TENSOR, DATA])
def test_of_equal_layers_one_is_live_at_a_time(form, mesh, layout):
    """Apart from what enters each layer, which is all that a checkpoint keeps."""
    wraps = kept, md.checkpoint
    everything, again = (beyond(program(form, wrap, mesh, layout, batch=4096)) for wrap in wraps)
    rows = 4096 // (4 if mesh == "data:4" else 1)
    stream = (LAYERS + 1) * rows * 8 * 4
    assert again - stream < 1.7 * (everything - stream) / LAYERS


@pytest.mark.parametrize(("form", "replays"), [("unrolled", 1), ("scanned", 1), ("nested", 2)])
def test_each_layer_reduces_as_often_as_megatrons(form, replays):
    """Two sums forwards and two backwards; each replay one, as nothing reads its last sum again.

    The input has no gradient: the first layer needs one sum less backwards. Of a pair in a
    checkpoint, the first is replayed to its end, and of the second nothing but its input is needed.
    """
    args = arguments(form, batch=4, embed=4, d_ff=8)
    found = lowered(gradients(form, md.checkpoint), *args, mesh=TENSOR[0], layout=TENSOR[1])
    sums = sum(c.count for c in found.collectives)
    assert not any(c.parts for c in found.collectives)
    assert sums == LAYERS * (4 + replays) - (form != "scanned")


def towers(x, w):
    """Two layers beside each other whose gradients are constants: nothing is there to wait for."""

    def loss(w):
        return sum(md.sum(md.checkpoint(layer)(x, one)) for one in w)

    return md.value_and_grad(loss)(w)


def test_what_is_computed_again_is_not_joined_with_the_forward_pass():
    ws, x = arguments("unrolled", batch=4, embed=4, d_ff=8, layers=2)
    found = lowered(towers, x, ws, mesh=TENSOR[0], layout=TENSOR[1])
    sums = [one for one in found.block.instructions if one.op in ("all_reduce", "barrier")]
    first, second = (n for n, one in enumerate(sums) if one.op == "barrier")
    assert [len(one.inputs) for one in sums[:first]] == [2]  # the towers are joined with each other
    assert [len(one.inputs) for one in sums[first + 1 : second]] == [1]
    assert len(sums[second + 1].inputs) == 1


@pytest.mark.parametrize("mesh", ["model:4", "data:4"])
def test_a_replay_waits_for_the_gradient(mesh):
    """In any order that data allow: all that is behind a barrier comes of a gradient too."""
    layout = dict([TENSOR, DATA])[mesh]
    found = program("unrolled", md.checkpoint, mesh, layout)
    maker = {v: one for one in found.block.instructions for v in one.outputs}

    def is_late(one):
        return any(v in maker and maker[v].source.backward for v in one.inputs)

    barriers = [one for one in found.block.instructions if one.op == "barrier"]
    assert len(barriers) == LAYERS and all(map(is_late, barriers))


def test_kept_sums_pass_through_the_barrier_as_well():
    wrap = functools.partial(md.checkpoint, collectives=True)
    ws, x = arguments("unrolled", batch=4, embed=4, d_ff=8)
    found = lowered(gradients("unrolled", wrap), ws, x, mesh=TENSOR[0], layout=TENSOR[1])
    assert sum(c.count for c in found.collectives) == LAYERS * 4 - 1  # none again
    maker = {v: one for one in found.block.instructions for v in one.outputs}
    for barrier in (one for one in found.block.instructions if one.op == "barrier"):
        assert "all_reduce" in [maker[v].op for v in barrier.inputs if v in maker]


@pytest.mark.parametrize("backend", ["jax", "jax_auto"])
def test_xla_holds_one_layer_at_a_time(backend):
    """XLA:CPU, whose account has neither inputs nor results in `temp`."""
    sizes = {"batch": 4096, "embed": 8, "d_ff": 64}

    def temp(wrap):
        args = arguments("unrolled", **sizes)
        compiled = md.jit(gradients("unrolled", wrap), *DATA, backend).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(md.checkpoint) < 2 / LAYERS * temp(kept)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_tpu_compiler_holds_one_layer_at_a_time():
    """In a process of its own: libtpu is loaded once, and tells JAX of no TPU."""
    code = """
        import meshdsl as md
        from meshdsl.lowering.backends.jax.executable import Executable
        from tests.benchmarks.gspmd_bytes import topology_mesh
        from tests.lowering.test_recompute import DATA, LAYERS, TENSOR, kept, program

        sizes = {"batch": 16384, "embed": 512, "d_ff": 2048}  # nothing fits into on-chip memory
        for form in ("unrolled", "partly scanned"):
            for mesh, layout in (DATA, TENSOR):
                found = []
                for wrap in (kept, md.checkpoint):
                    lowered = program(form, wrap, mesh, layout, **sizes)
                    devices = topology_mesh(lowered.mesh, "v5p:2x2x1")
                    compiled = Executable(lowered, (), devices, platform="cpu")
                    found.append(compiled.memory_analysis().temp_size_in_bytes)
                rows = 16384 // (4 if mesh == "data:4" else 1)
                stream = LAYERS * rows * 512 * 4
                assert found[1] - stream < 2 / LAYERS * found[0], (form, mesh, found)
    """
    quiet = {"TPU_ACCELERATOR_TYPE": "v5e-256", "TPU_WORKER_HOSTNAMES": "localhost"}
    alone = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **quiet, **alone}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)
