"""The JAX backend: one `jax.shard_map` with the program's collectives written out.

`function` is the program as a plain JAX function of global, logical arrays. `Executable` is the
program compiled for its mesh, of arrays as they are stored, pads and all (see `placing`), with its
inputs placed and its donated buffers reused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.compiler_flags import Flag, chosen, recommended, unknown
from meshdsl.lowering.backends.jax.direct import named, of_trees, owners, takes
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.backends.jax.placing import Storage, partition_spec, taking_logical
from meshdsl.lowering.backends.jax.torus import placed
from meshdsl.lowering.program import Block, SpmdProgram, Value
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.signature import Trees


class Executable:
    """A program compiled for the devices of its mesh.

    Args:
        donated: per input, whether its buffer may be reused for an output.
        devices: the devices of the mesh; by default the first ones there are. Those of a topology
            will do (`jax.experimental.topologies`), to compile for machines that are not there.
        platform: whose fused kernels are used; by default that of the devices.
        compiler_options: XLA's, by name; by default those recommended for the devices, with what
            `program.compiler_flags` says (see `backends.compiler_flags`).
        trees: how the program is called; for a direct call.

    Attributes:
        inputs, outputs: how each is stored.
        shardings: those of the inputs.
        cuts: those of the outputs.
        direct: the program as a function of its callers' trees (see `direct`); None without.

    Raises:
        ValueError: the mesh needs more devices than there are, or a dtype needs 64-bit mode,
            or the compiler does not know a flag.
    """

    def __init__(
        self,
        program: SpmdProgram,
        donated: Sequence[bool] = (),
        devices: jax.sharding.Mesh | None = None,
        platform: str | None = None,
        compiler_options: Mapping[str, Flag] | None = None,
        trees: Trees | None = None,
    ) -> None:
        self.program = program
        block = program.block
        mesh = devices or device_mesh(program.mesh)
        self.inputs, self.outputs = (
            [Storage.of(value.shape, value.layout, program.mesh, mesh) for value in values]
            for values in (block.inputs, block.outputs)
        )
        self.shardings = [stored.sharding for stored in self.inputs]
        self.cuts = [stored.cuts for stored in self.outputs]
        reused = _reusable(block, donated)
        arguments = (
            owners(trees, len(self.inputs), frozenset(reused)) if trees is not None else None
        )
        self._trees = trees if arguments is not None and not block.has_effect else None
        jitted = self._jitted(mesh, platform, reused if self._trees is None else arguments or ())
        rows = zip(self.inputs, block.inputs, strict=True)
        avals = [jax.ShapeDtypeStruct(stored.sizes, value.dtype) for stored, value in rows]
        if compiler_options is None:
            device = mesh.devices.flat[0]
            default = recommended(device.device_kind, device.platform, program.block.replays)
            compiler_options = chosen(program.compiler_flags, default)
        options: Any = dict(compiler_options) or None
        try:
            self.compiled = jitted.lower(*self._arguments(avals)).compile(options)
        except jax.errors.JaxRuntimeError as error:
            if reason := unknown(error, compiler_options):
                raise ValueError(reason) from error
            raise
        # Of an input that the program does not use, JAX would not compare the dtype.
        dropped = len(jax.tree.leaves(self.compiled.input_shardings)) < len(self.inputs)
        self.direct: Callable | None = None if self._trees is None or dropped else self.compiled

    def _jitted(
        self, mesh: jax.sharding.Mesh, platform: str | None, donated: Sequence[int]
    ) -> jax.stages.Wrapped:
        """Returns the program as a function of trees, or of arrays, with all places given."""
        run = self.traceable(mesh, platform)
        outs: Any = tuple(stored.sharding for stored in self.outputs)
        if self._trees is not None:
            run = of_trees(run, self._trees, self.inputs, self.outputs)
            outs = self._trees.results(named(outs, self.outputs))
        return jax.jit(
            run,
            in_shardings=self._arguments(self.shardings),
            out_shardings=outs,
            donate_argnums=tuple(donated),
        )

    def _arguments(self, leaves: Sequence[Any]) -> tuple:
        """Returns what the compiled function takes, made of one leaf for each input."""
        if self._trees is None:
            return tuple(leaves)
        return self._trees.arguments(named(leaves, self.inputs))

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether `direct` may be called with arrays like these."""
        return all(map(takes, leaves, self.inputs))

    def traceable(self, mesh: jax.sharding.Mesh, platform: str | None) -> Callable:
        """Returns the program as a jittable function of global arrays, as they are stored."""
        return _of_stored(self.program, mesh, platform)

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[jax.Array]:
        """Runs the program; arrays that are not in place, or not as stored, are put there.

        Args:
            leaves: arrays; those with pads as NamedArrays.
        """
        placed = [
            leaf
            if isinstance(leaf, jax.Array) and leaf.sharding == at.sharding and not at.cuts
            else at.put(leaf)
            for leaf, at in zip(leaves, self.inputs, strict=True)
        ]
        results = self.compiled(*self._arguments(placed))
        if self._trees is not None:
            results = jax.tree.leaves(results)
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


def function(
    program: SpmdProgram, mesh: jax.sharding.Mesh | None = None, platform: str | None = None
) -> Callable:
    """Returns the program as a jittable function of its inputs, as global arrays without pads."""
    return taking_logical(_of_stored(program, mesh, platform), program)


def _of_stored(
    program: SpmdProgram, mesh: jax.sharding.Mesh | None, platform: str | None
) -> Callable:
    check_dtypes(program)
    block = program.block
    own = mesh.devices.flat[0].platform if mesh else jax.default_backend()
    kernels = own if platform is None else platform

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        machine = Machine(program.mesh, EMITTERS, kernels, torus=own == "tpu")
        results = machine.run(block, arrays)
        return tuple(_apart(block, results) if machine.torus else results)

    if program.mesh.size == 1:
        return local
    return jax.shard_map(
        local,
        mesh=mesh or device_mesh(program.mesh),
        in_specs=tuple(partition_spec(v.shape, v.layout) for v in block.inputs),
        out_specs=tuple(partition_spec(v.shape, v.layout) for v in block.outputs),
        check_vma=False,
    )


def _apart(block: Block, results: Sequence[jax.Array]) -> list[jax.Array]:
    """Writes outputs that leave an all_gather once more, where they may replace an input.

    XLA:TPU copies a donated input before the first instruction, and holds the copy to the end, if
    what takes its place comes straight from an all_gather. Rounding to the precision that there is
    stands between and changes nothing (TPUs take subnormal numbers for 0 everywhere).
    """
    gathered = {v for i in block.instructions if i.op == "all_gather" for v in i.outputs}
    inputs = {(v.shape.sizes, v.dtype, v.layout) for v in block.inputs}

    def apart(value: Value, result: jax.Array) -> jax.Array:
        replaces = (value.shape.sizes, value.dtype, value.layout) in inputs
        if value not in gathered or not replaces or not is_float(value.dtype):
            return result
        precision = jnp.finfo(value.dtype)
        return lax.reduce_precision(result, precision.nexp, precision.nmant)

    return [apart(*pair) for pair in zip(block.outputs, results, strict=True)]


def device_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """Returns the devices of a mesh.

    Raises:
        ValueError: there are fewer devices than the mesh has, or they cannot be laid out so.
    """
    devices = jax.devices()
    if mesh.size > len(devices):
        raise ValueError(
            f"mesh {mesh} needs {mesh.size} devices, but this machine has {len(devices)} "
            f"({devices[0].platform}). Use a smaller mesh, or make virtual CPU devices: "
            f"--host_devices={mesh.size}, or in Python, before JAX is first used, "
            f"jax.config.update('jax_num_cpu_devices', {mesh.size})"
        )
    return placed(mesh, devices[: mesh.size])


def check_dtypes(program: SpmdProgram) -> None:
    """Raises ValueError if the program uses a dtype that JAX would narrow."""
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
