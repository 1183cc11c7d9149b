"""The JAX backend: one `jax.shard_map` with the program's collectives written out.

`function` is the program as a plain JAX function of global arrays; `Executable` is that function
compiled for the mesh, with its inputs placed and its donated buffers reused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshdsl.dims import Shape
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.program import Block, SpmdProgram, Value
from meshdsl.mesh import Mesh


class Executable:
    """A program compiled for the devices of its mesh.

    Args:
        donated: per input, whether its buffer may be reused for an output.
        devices: the devices of the mesh; by default the first ones there are.

    Raises:
        ValueError: the mesh needs more devices than there are, or a dtype needs 64-bit mode.
    """

    def __init__(
        self,
        program: SpmdProgram,
        donated: Sequence[bool] = (),
        devices: jax.sharding.Mesh | None = None,
    ) -> None:
        self.program = program
        block = program.block
        mesh = devices or device_mesh(program.mesh)
        self.shardings = [_sharding(mesh, value) for value in block.inputs]
        reused = _reusable(block, donated)
        jitted = jax.jit(
            function(program, mesh),
            in_shardings=tuple(self.shardings),
            out_shardings=tuple(_sharding(mesh, value) for value in block.outputs),
            donate_argnums=tuple(reused),
        )
        avals = [jax.ShapeDtypeStruct(v.shape.sizes, v.dtype) for v in block.inputs]
        self.compiled = jitted.lower(*avals).compile()

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[jax.Array]:
        """Runs the program; arrays that are not in place yet are put there."""
        placed = [
            leaf if getattr(leaf, "sharding", None) == sharding else jax.device_put(leaf, sharding)
            for leaf, sharding in zip(leaves, self.shardings, strict=True)
        ]
        results = self.compiled(*placed)
        if self.program.block.has_effect:  # a call returns when all has been done that it does
            jax.effects_barrier()
            jax.block_until_ready(results)
        return results

    def as_text(self) -> str:
        """Returns the optimised HLO."""
        return self.compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """Returns XLA's account of the memory of one device."""
        return self.compiled.memory_analysis()


def function(program: SpmdProgram, mesh: jax.sharding.Mesh | None = None) -> Callable:
    """Returns the program as a jittable function of its inputs, as global arrays."""
    _check_dtypes(program)
    block = program.block
    platform = mesh.devices.flat[0].platform if mesh else jax.default_backend()

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(Machine(program.mesh, EMITTERS, platform).run(block, arrays))

    if program.mesh.size == 1:
        return local
    return jax.shard_map(
        local,
        mesh=mesh or device_mesh(program.mesh),
        in_specs=tuple(partition_spec(v.shape, v.layout) for v in block.inputs),
        out_specs=tuple(partition_spec(v.shape, v.layout) for v in block.outputs),
        check_vma=False,
    )


def device_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """Returns the devices of a mesh.

    Raises:
        ValueError: there are fewer devices than the mesh has.
    """
    devices = jax.devices()
    if mesh.size > len(devices):
        raise ValueError(
            f"mesh {mesh} needs {mesh.size} devices, but this machine has {len(devices)} "
            f"({devices[0].platform}). Use a smaller mesh, or make virtual CPU devices: "
            f"--host_devices={mesh.size}, or in Python, before JAX is first used, "
            f"jax.config.update('jax_num_cpu_devices', {mesh.size})"
        )
    sizes = tuple(size for _, size in mesh.axes)
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, mesh.names, axis_types=kinds, devices=devices[: mesh.size])


def partition_spec(shape: Shape, layout: TensorLayout) -> PartitionSpec:
    """Returns a tensor's layout in JAX's terms."""
    parts = [layout.axes(name) for name in shape.names]
    return PartitionSpec(*(p[0] if len(p) == 1 else p or None for p in parts))


def _sharding(mesh: jax.sharding.Mesh, value: Value) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(value.shape, value.layout))


def _check_dtypes(program: SpmdProgram) -> None:
    if jax.config.read("jax_enable_x64"):
        return
    wide = {v.dtype.name for v in (*program.block.inputs, *program.block.outputs)}
    wide |= {v.dtype.name for i, _ in program.block.walk() for v in i.outputs}
    found = sorted(wide & {"float64", "int64", "uint64", "complex128"})
    if found:
        raise ValueError(
            f"the program uses {', '.join(found)}, which JAX turns into 32 bits unless told "
            "otherwise: call jax.config.update('jax_enable_x64', True) first, or use 32-bit dtypes"
        )


def _reusable(block: Block, donated: Sequence[bool]) -> list[int]:
    """Returns the donated inputs whose buffers fit an output."""
    free = collections.Counter((v.shape.sizes, v.dtype, v.layout) for v in block.outputs)
    found = []
    for index, (value, given) in enumerate(zip(block.inputs, donated, strict=False)):
        key = (value.shape.sizes, value.dtype, value.layout)
        if given and free[key]:
            free[key] -= 1
            found.append(index)
    return found
