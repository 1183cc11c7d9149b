"""Exchange: windows of a split dim, against windows cut out of the whole array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.backends import load
from meshdsl.lowering.communication.exchange import Interval, Run, bounds, fetch, gather
from meshdsl.lowering.program import SpmdProgram
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape

MESHES = ["a:2", "a:3", "a:8", "a:2,b:2", "b:3,a:2", "a:2,b:4"]


def program(mesh, size, axes, starts, length, fill, held=True):
    """Returns a program from a whole array, split first (or not), to every device's window."""
    builder = BlockBuilder(mesh)
    dim, other = Dimension("x", size), Dimension("y", 2)
    whole = builder.value(Shape([other, dim]), np.dtype("float32"), TensorLayout())
    value = whole
    if held and axes:
        split = TensorLayout.of({"x": axes})
        value = builder.one("slice", (whole,), whole.shape, whole.dtype, split, axes=axes, dim="x")
    out = fetch(builder, value, "x", axes, starts, length, fill)
    block = builder.finish([whole], [out])
    return SpmdProgram("windows", mesh, Layout(), block, ("x",), ("",))


def windows(array, starts, length, fill):
    found = np.full((2, length * len(starts)), fill, array.dtype)
    for number, start in enumerate(starts):
        for i in range(length):
            if 0 <= start + i < array.shape[1]:
                found[:, number * length + i] = array[:, start + i]
    return found


@st.composite
def cases(draw):
    mesh = Mesh.parse(draw(st.sampled_from(MESHES)))
    axes = tuple(draw(st.permutations(mesh.names)))[: draw(st.integers(0, len(mesh.names)))]
    size = draw(st.integers(1, 19))
    devices = mesh.extent(axes)
    regular = draw(st.booleans())
    if regular:
        step, shift = draw(st.integers(0, 5)), draw(st.integers(-9, 9))
        starts = [step * d + shift for d in range(devices)]
    else:
        starts = draw(st.lists(st.integers(-9, 22), min_size=devices, max_size=devices))
    return mesh, size, axes, starts, draw(st.integers(1, 12)), draw(st.booleans())


@given(cases())
@settings(max_examples=150)
def test_every_device_gets_its_window(case):
    mesh, size, axes, starts, length, held = case
    made = program(mesh, size, axes, starts, length, -1.0, held)
    array = np.arange(2 * size, dtype=np.float32).reshape(2, size)
    (got,) = load("numpy").Executable(made).call_flat([array])
    np.testing.assert_array_equal(got, windows(array, starts, length, -1.0))


@given(
    st.sampled_from(MESHES),
    st.lists(st.integers(1, 11), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_every_device_gets_its_runs_of_several_values(mesh, sizes, seed):
    mesh, rng = Mesh.parse(mesh), np.random.default_rng(seed)
    axes, length = mesh.names, 9
    arrays = [100.0 * n + np.arange(size, dtype=np.float32) for n, size in enumerate(sizes)]
    runs, expected = [], np.full((mesh.size, length), -1, np.float32)
    for device in range(mesh.size):
        runs.append([])
        for at in (0, 3, 7):
            value = int(rng.integers(len(sizes)))
            start, size = int(rng.integers(-2, sizes[value] + 1)), int(rng.integers(0, 3))
            runs[-1].append(Run(Interval(start, start + size), at, value))
            for i in range(size):
                if 0 <= start + i < sizes[value]:
                    expected[device, at + i] = arrays[value][start + i]
    builder = BlockBuilder(mesh)
    split = TensorLayout.of({"x": axes})
    inputs, values = [], []
    for size in sizes:
        shape, dtype = Shape([Dimension("x", size)]), np.dtype("float32")
        inputs.append(builder.value(shape, dtype, TensorLayout()))
        params = {"axes": axes, "dim": "x"}
        values.append(builder.one("slice", inputs[-1:], shape, dtype, split, **params))
    out = gather(builder, values, "x", axes, runs, length, -1.0)
    paths = ("x",) * len(sizes)
    made = SpmdProgram("runs", mesh, Layout(), builder.finish(inputs, [out]), paths, ("",))
    (got,) = load("numpy").Executable(made).call_flat(arrays)
    np.testing.assert_array_equal(got, expected.reshape(-1))


def test_what_many_permutes_would_bring_is_gathered_at_once():
    made = program(Mesh.parse("a:8"), 16, ("a",), [0] * 8, 16, 0.0)
    assert [(c.kind, c.wire_bytes) for c in made.collectives] == [("all_gather", 7 * 16)]
    swap = program(Mesh.parse("a:2"), 16, ("a",), [8, 0], 8, 0.0)
    assert [(c.kind, c.wire_bytes) for c in swap.collectives] == [("permute", 64)]


@pytest.mark.parametrize(
    "mesh,size,axes,shift,length",
    [
        ("a:4", 8, ("a",), -1, 4),
        ("a:8", 5, ("a",), -3, 7),
        ("a:2,b:2", 7, ("b", "a"), 2, 3),
    ],
)
def test_on_jax(mesh, size, axes, shift, length):
    mesh = Mesh.parse(mesh)
    block = -(-size // mesh.extent(axes))
    starts = [block * d + shift for d in range(mesh.extent(axes))]
    made = program(mesh, size, axes, starts, length, 7.0)
    array = np.arange(2 * size, dtype=np.float32).reshape(2, size)
    (got,) = load("jax").Executable(made).call_flat([array])
    np.testing.assert_array_equal(np.asarray(got), windows(array, starts, length, 7.0))


def test_a_halo_of_one_is_two_permutes_of_one_slab():
    made = program(Mesh.parse("a:4"), 16, ("a",), [4 * d - 1 for d in range(4)], 6, 0.0)
    assert [(c.kind, c.payload_bytes) for c in made.collectives] == [("permute", 8)] * 2


def test_a_window_that_is_the_shard_moves_nothing():
    made = program(Mesh.parse("a:4"), 16, ("a",), [0, 4, 8, 12], 4, 0.0)
    assert [i.op for i in made.block.instructions] == ["slice"]


def test_a_mirrored_dim_is_one_permute_of_whole_shards():
    made = program(Mesh.parse("a:4"), 16, ("a",), [12, 8, 4, 0], 4, 0.0)
    assert [(c.kind, c.payload_bytes) for c in made.collectives] == [("permute", 32)]


def test_bounds_are_blocks_of_blocks():
    mesh = Mesh.parse("a:2,b:2")
    assert bounds(5, ("a", "b"), mesh) == [(0, 2), (2, 3), (3, 5), (5, 5)]
    assert bounds(5, (), mesh) == [(0, 5)]


def test_positions_and_masks_agree_with_the_bounds():
    a = md.Dimension("a", 7)
    for mesh, axes in (("x:2,y:2", "x+y"), ("x:2,y:2", "y+x"), ("x:8", "x"), ("x:3,y:2", "x+y")):
        count = md.jit(lambda v: md.sum(v * 0 + 1, over="a"), mesh, f"a:{axes}", backend="numpy")
        assert float(np.asarray(count(md.named(np.full(7, 3.0, np.float32), [a])))) == 7
