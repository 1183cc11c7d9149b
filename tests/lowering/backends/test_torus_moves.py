"""Gathers and scatters among TPUs: in steps, and in blocks that libtpu scatters."""

from importlib.util import find_spec
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.hlo.wire import sent
from meshdsl.lowering.backends.jax import device_mesh
from meshdsl.lowering.backends.jax import torus_moves as steps
from meshdsl.lowering.backends.jax.ahead import devices
from meshdsl.lowering.backends.jax.arguments import partition_spec
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.backends.jax.torus import arrange_devices
from tests.ops.agreement import random

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")


def test_a_whole_torus_is_gathered_within_groups_and_across_them():
    machine = Machine(Mesh.parse("data:64"), {}, torus=True)
    (near_axes, near), (far_axes, far) = steps.steps(machine, ["data"])
    assert near_axes == far_axes == ["data"]
    assert near[:2] == [[*range(8)], [*range(8, 16)]] and len(near) == 8
    assert far[:2] == [[*range(0, 64, 8)], [*range(1, 64, 8)]] and len(far) == 8


@pytest.mark.parametrize(
    ("mesh", "axes", "torus"),
    [("data:64", ["data"], False), ("data:32,model:2", ["data"], True), ("x:67", ["x"], True)],
)
def test_other_groups_are_gathered_at_once(mesh, axes, torus):
    assert steps.steps(Machine(Mesh.parse(mesh), {}, torus=torus), axes) == [(axes, None)]


def test_several_axes_are_steps_of_their_own():
    machine = Machine(Mesh.parse("slice:1,data:16,model:4"), {}, torus=True)
    assert steps.steps(machine, ["slice", "data", "model"]) == [(["model"], None), (["data"], None)]


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [("data:8", ("data",)), ("a:2,b:4", ("a", "b")), ("a:4,b:2", ("b", "a")), ("a:2,b:4", ("b",))],
)
def test_steps_gather_and_scatter_what_one_would(mesh, axes, monkeypatch):
    monkeypatch.setattr(steps, "MANY", 4)
    mesh = Mesh.parse(mesh)
    machine = Machine(mesh, {}, torus=True)
    x = np.arange(64.0).reshape(16, 4)
    each = P(tuple(axes))

    def run(function, given, made):
        mapped = jax.shard_map(
            lambda x: function(machine, x, axes, 0),
            mesh=device_mesh(mesh),
            in_specs=given,
            out_specs=made,
            check_vma=False,
        )
        return np.asarray(jax.jit(mapped)(x))

    assert len(steps.steps(machine, axes)) > 1
    np.testing.assert_array_equal(run(steps.all_gather, each, P()), x)
    np.testing.assert_array_equal(run(steps.reduce_scatter, P(), each), mesh.extent(axes) * x)


@pytest.mark.parametrize(
    ("sizes", "at"),
    [
        ((8,), 0),
        ((16, 128), 0),
        ((64, 128), 0),
        ((3, 16), 1),
        ((128, 16), 1),
        ((16, 24), 0),
        ((2, 16, 128), 1),
        ((2, 16, 3), 1),
        ((2, 3, 128), 2),
    ],
)
def test_blocks_of_any_shape_are_scattered_as_numpy_would(sizes, at):
    machine = Machine(Mesh.parse("data:8"), {}, torus=True)
    x = np.random.default_rng(0).integers(0, 100, (8, *sizes)).astype("float32")

    def local(x):
        return steps.reduce_scatter(machine, x[0], ["data"], at)[None]

    mapped = jax.shard_map(
        local, mesh=device_mesh(machine.mesh), in_specs=P("data"), out_specs=P("data")
    )
    found = np.asarray(jax.jit(mapped)(x))
    np.testing.assert_array_equal(found, np.stack(np.split(x.sum(0), 8, axis=at)))


@pytest.mark.parametrize("sizes", [{"a": 64, "b": 24, "c": 8}, {"a": 24, "large": 8192}])
@pytest.mark.parametrize(("mesh", "axes"), [("data:8", "data"), ("x:2,y:4", "x+y")])
def test_tensors_of_less_than_a_tile_are_sent_together_in_entire_tiles(mesh, axes, sizes):
    """Each would be an all_reduce that the device waits for."""
    rows, *dims = md.dims(rows=16, **sizes)

    def loss(w, x):
        return sum(md.sum(md.square(x[name] * w[name])) for name in w)

    def step(w, x):
        return {"w": md.grad(loss)(w, x)}

    w = {dim.name: random([dim]) for dim in dims}
    x = {dim.name: random([rows, dim]) for dim in dims}
    layout = "; ".join([f"rows:{axes}", *(f"w/{name}:{axes}" for name in sizes)])
    program = md.jit(step, mesh, layout).lower(w, x)
    block = program.block
    joined = [(one.op, len(one.parts)) for one in block.instructions if one.is_collective]
    assert sorted(joined) == [("all_gather", len(w)), ("reduce_scatter", len(w))]

    run = on_a_torus(program)
    given = [np.asarray(each) for each in (*w.values(), *x.values())]
    text = str(jax.make_jaxpr(run)(*given))
    sent = len(sizes) if "large" in sizes else 1
    assert text.count("= all_gather[") == text.count("= reduce_scatter[") == sent
    for name, found in zip(w, jax.jit(run)(*given), strict=True):
        want = 2 * np.asarray(w[name]) * np.square(np.asarray(x[name])).sum(0)
        np.testing.assert_allclose(found, want, rtol=1e-5)


def on_a_torus(program):
    """Returns a program as TPUs would run it, for virtual devices."""
    block = program.block

    def local(*arrays):
        return tuple(Machine(program.mesh, EMITTERS, torus=True).run(block, arrays))

    laid = device_mesh(program.mesh)
    specs = [
        tuple(partition_spec(value.shape, value.layout) for value in values)
        for values in (block.inputs, block.outputs)
    ]
    return jax.shard_map(local, mesh=laid, in_specs=specs[0], out_specs=specs[1], check_vma=False)


@pytest.mark.parametrize(("kind", "sum_of"), [("psum", np.sum), ("pmax", np.max)])
def test_sums_of_less_than_a_sparse_core_gets_are_sent_together(kind, sum_of):
    """The device would wait for each."""
    rows, *dims = md.dims(rows=16, a=24, b=8, large=2**14)
    reduce = {"psum": md.sum, "pmax": md.max}[kind]
    x = {dim.name: random([rows, dim]) for dim in dims}
    x["c"] = random([rows, *md.dims(d=2, e=3)])
    x = dict(sorted(x.items()))  # in the order of the program's inputs

    def f(x):
        return {name: reduce(each, "rows") for name, each in x.items()}

    lowered = md.jit(f, "data:8", "rows:data").lower(x)
    (joined,) = (one for one in lowered.block.instructions if one.is_collective)
    assert len(joined.parts) == 4
    run, given = on_a_torus(lowered), [np.asarray(each) for each in x.values()]
    assert str(jax.make_jaxpr(run)(*given)).count(f"= {kind}") == 2
    for each, found in zip(given, jax.jit(run)(*given), strict=True):
        np.testing.assert_allclose(found, sum_of(each, 0), rtol=1e-5, atol=1e-5)


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "mesh", "sizes", "at"),
    [
        ("v5e:16x16", "data:32,model:8", (4096, 512), 0),
        ("v5e:16x16", "data:32,model:8", (4096, 1376), 0),
        ("v5e:16x16", "data:32,model:8", (1376, 4096), 1),
        ("v5e:16x16", "data:32,model:8", (4, 128, 4096), 2),
        ("v5e:16x16", "data:32,model:8", (96, 4096), 0),
        ("v5p:8x8x8", "data:64,model:8", (12, 128, 12288), 2),
    ],
)
def test_libtpu_scatters_without_sending_the_whole(topology, mesh, sizes, at, tmp_path):
    torus = Topology.parse(topology)
    machine = Machine(Mesh.parse(mesh), {}, torus=True)
    laid = arrange_devices(machine.mesh, devices(torus))
    every = P(machine.mesh.names)

    def local(x, y):
        product = jnp.einsum("ta,tb->ab", x, y).astype("bfloat16").reshape(sizes)
        return steps.reduce_scatter(machine, product, ["data"], at)

    run = jax.shard_map(local, mesh=laid, in_specs=(every, every), out_specs=every, check_vma=False)
    given = [
        jax.ShapeDtypeStruct(
            (torus.devices * 64, n), "bfloat16", sharding=NamedSharding(laid, every)
        )
        for n in (prod(sizes[:-1]), sizes[-1])
    ]
    jax.jit(run).lower(*given).compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (file,) = tmp_path.glob("*.after_optimizations.txt")
    found = sent(file.read_text(), torus.devices)
    assert {one.kind for one in found} == {"reduce_scatter"}
    places = machine.mesh.sizes["data"]
    assert sum(one.wire_bytes for one in found) == (places - 1) / places * prod(sizes) * 2
