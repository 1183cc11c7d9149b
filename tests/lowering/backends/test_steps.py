"""Gathers and scatters among many TPUs, in two steps."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshdsl.lowering.backends.jax import device_mesh, steps
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.mesh import Mesh


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
