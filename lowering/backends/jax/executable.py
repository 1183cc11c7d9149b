"""The JAX backend: a program becomes one `jax.shard_map` with explicit collectives.

`function` is the program as a plain JAX function of global, logical arrays. `Executable` is the
program compiled for its mesh. Its arrays are as stored, with pads (see `arguments`). It moves
inputs to the devices and reuses donated buffers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.compiler_flags import (
    Flag,
    chosen,
    recommended,
    unknown,
    without_offloading,
)
from meshdsl.lowering.backends.jax import kept
from meshdsl.lowering.backends.jax.arguments import Storage, as_logical_function, partition_spec
from meshdsl.lowering.backends.jax.direct import Once, accepts, in_precision, is_jit_disabled
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.backends.jax.torus import arrange_devices
from meshdsl.lowering.program import Block, SpmdProgram, Value
from meshdsl.tensors.dtypes import is_float

WITHOUT_OFFLOADING = (
    "the program does not fit the devices with collectives on SparseCores, for which the compiler "
    "holds more at once. It is compiled without them, so the steps wait for what is sent. A layout "
    "that needs less memory, or more microbatches, would let it hide that again"
)


class Executable:
    """A program compiled for the devices of its mesh.

    Args:
        donated: per input, whether its buffer may be reused for an output.
        devices: the devices of the mesh; by default the first of the machine. They may belong to a
            topology (`jax.experimental.topologies`), to compile for TPUs that are not there.
        platform: the platform whose fused kernels are used; by default that of the devices.
        compiler_options: XLA's, by name; by default those recommended for the devices, merged
            with `program.compiler_flags` (see `backends.compiler_flags`). If the program does not
            fit with collectives on SparseCores, it is compiled without them, with a warning.

    Attributes:
        inputs, outputs: the form in which each is stored.
        shardings: of the inputs.
        cuts: of the outputs.

    Raises:
        ValueError: the mesh has more devices than the machine, a dtype needs 64-bit mode, or the
            compiler does not know a flag.
    """

    def __init__(
        self,
        program: SpmdProgram,
        donated: Sequence[bool] = (),
        devices: jax.sharding.Mesh | None = None,
        platform: str | None = None,
        compiler_options: Mapping[str, Flag] | None = None,
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
        rows = zip(self.inputs, block.inputs, strict=True)
        avals = [jax.ShapeDtypeStruct(stored.sizes, value.dtype) for stored, value in rows]
        if compiler_options is None:
            device = mesh.devices.flat[0]
            compiler_options = chosen(program.compiler_flags, self.recommended(device))
        self._once = Once(self.traceable(mesh, platform))

        def jitted(options: Mapping[str, Flag]) -> Any:
            return jax.jit(
                self._once.function,
                in_shardings=tuple(self.shardings),
                out_shardings=tuple(stored.sharding for stored in self.outputs),
                donate_argnums=tuple(_reusable(block, donated)),
                compiler_options=dict(options) or None,
            )

        kind = type(self)
        emitted = f"{kind.__module__}.{kind.__qualname__}", platform, _reusable(block, donated)

        def compiled(options: Mapping[str, Flag]) -> Any:
            self._jitted = jitted(options)
            lower = functools.partial(self._jitted.lower, *avals)
            return kept.compiled(lower, program, emitted, mesh, options)

        try:
            self.compiled = compiled(compiler_options)
        except jax.errors.JaxRuntimeError as error:
            if reason := unknown(error, compiler_options):
                raise ValueError(reason) from error
            smaller = without_offloading(compiler_options, program.compiler_flags)
            if "RESOURCE_EXHAUSTED" not in str(error) or smaller is None:
                raise
            self.compiled = compiled(smaller)
            warnings.warn(WITHOUT_OFFLOADING, stacklevel=2)
        self._compiled_ahead = in_precision(self.compiled)

    @property
    def direct(self) -> Callable | None:
        """The program as a function of stored arrays (see `direct`); None: it has none."""
        if self.program.block.has_effect:
            return None
        # On several devices JAX traces anew for arguments of other kinds: it knows their mesh.
        if self.program.mesh.size == 1 and not self._once.outdated:
            return self._jitted
        # JAX does not check the dtype of an input that the program does not use.
        dropped = len(jax.tree.leaves(self.compiled.input_shardings)) < len(self.inputs)
        return None if dropped else self._compiled_ahead

    def recommended(self, device: Any) -> Mapping[str, Flag]:
        """Returns the compiler's flags for a device."""
        return recommended(device.device_kind, device.platform, self.program.block.replays)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether `direct` accepts these arrays."""
        return all(map(accepts, leaves, self.inputs))

    def traceable(self, mesh: jax.sharding.Mesh, platform: str | None) -> Callable:
        """Returns the program as a jittable function of global arrays as stored."""
        return _stored_function(self.program, mesh, platform, compiled=True)

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[jax.Array]:
        """Runs the program; arrays on other devices, or stored in another form, are converted.

        Args:
            leaves: arrays; arrays with pads are NamedArrays.
        """
        placed = [
            leaf
            if isinstance(leaf, jax.Array) and leaf.sharding == stored.sharding and not stored.cuts
            else stored.put(leaf)
            for leaf, stored in zip(leaves, self.inputs, strict=True)
        ]
        # A compiled program has no function to run instead of it, which `jax.disable_jit` asks for.
        with jax.disable_jit(False) if is_jit_disabled() else contextlib.nullcontext():
            results = self.compiled(*placed)
        if self.program.block.has_effect:  # a call returns after all its effects
            jax.effects_barrier()
            jax.block_until_ready(results)
        return results

    def as_text(self) -> str:
        """Returns the optimised HLO."""
        return self.compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """Returns XLA's analysis of the memory of one device."""
        return self.compiled.memory_analysis()


def function(
    program: SpmdProgram, mesh: jax.sharding.Mesh | None = None, platform: str | None = None
) -> Callable:
    """Returns the program as a jittable function of its inputs, as global arrays without pads."""
    return as_logical_function(_stored_function(program, mesh, platform), program)


def _stored_function(
    program: SpmdProgram,
    mesh: jax.sharding.Mesh | None,
    platform: str | None,
    compiled: bool = False,
) -> Callable:
    """Returns the program as a jittable function of global arrays as stored.

    Args:
        compiled: whether it is compiled as it is. Otherwise callers may differentiate it.
    """
    check_dtypes(program)
    block = program.block
    target = mesh.devices.flat[0].platform if mesh else jax.default_backend()
    kernels = target if platform is None else platform

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        torus = target == "tpu"
        machine = Machine(
            program.mesh, EMITTERS, kernels, torus, unfilled=torus and compiled, in_place=compiled
        )
        results = machine.run(block, arrays)
        return tuple(_detached(block, results) if machine.torus else results)

    if program.mesh.size == 1:
        return local
    return jax.shard_map(
        local,
        mesh=mesh or device_mesh(program.mesh),
        in_specs=tuple(partition_spec(v.shape, v.layout) for v in block.inputs),
        out_specs=tuple(partition_spec(v.shape, v.layout) for v in block.outputs),
        check_vma=False,
    )


def _detached(block: Block, results: Sequence[jax.Array]) -> list[jax.Array]:
    """Rounds outputs of all_gathers to their own precision, if they may replace an input."""
    # XLA:TPU copies a donated input before the first instruction, and keeps the copy to the end, if
    # an all_gather writes directly to its buffer. An instruction in between avoids that. Rounding
    # to a number's own precision changes nothing (TPUs flush subnormal numbers to 0 everywhere).
    gathered = {v for i in block.instructions if i.op == "all_gather" for v in i.outputs}
    inputs = {(v.shape.sizes, v.dtype, v.layout) for v in block.inputs}

    def detached(value: Value, result: jax.Array) -> jax.Array:
        replaces = (value.shape.sizes, value.dtype, value.layout) in inputs
        if value not in gathered or not replaces or not is_float(value.dtype):
            return result
        precision = jnp.finfo(value.dtype)
        return lax.reduce_precision(result, precision.nexp, precision.nmant)

    return [detached(*pair) for pair in zip(block.outputs, results, strict=True)]


def device_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """Returns the devices of a mesh.

    Raises:
        ValueError: the mesh has more devices than the machine, cannot be laid out on them, or has
            none of some process.
    """
    devices = jax.devices()
    if mesh.size > len(devices):
        raise ValueError(
            f"mesh {mesh} needs {mesh.size} devices, but this machine has {len(devices)} "
            f"({devices[0].platform}). Use a smaller mesh, or make virtual CPU devices: "
            f"--host_devices={mesh.size}, or in Python, before JAX is first used, "
            f"jax.config.update('jax_num_cpu_devices', {mesh.size})"
        )
    processes = {device.process_index for device in devices}
    idle = sorted(processes - {device.process_index for device in devices[: mesh.size]})
    if idle:
        raise ValueError(
            f"mesh {mesh} has {mesh.size} devices, and the {len(processes)} processes of this job "
            f"have {len(devices)}: nothing is left to do for process {', '.join(map(str, idle))}. "
            f"Use a mesh of {len(devices)} devices, or {len(processes) - len(idle)} processes"
        )
    return arrange_devices(mesh, devices[: mesh.size])


def check_dtypes(program: SpmdProgram) -> None:
    """Raises ValueError if the program uses a dtype that JAX would narrow."""
    if jax.config.read("jax_enable_x64"):
        return
    dtypes = {v.dtype.name for v in (*program.block.inputs, *program.block.outputs)}
    dtypes |= {v.dtype.name for i, _ in program.block.walk() for v in i.outputs}
    narrowed = sorted(dtypes & {"float64", "int64", "uint64", "complex128"})
    if narrowed:
        raise ValueError(
            f"the program uses {', '.join(narrowed)}, which JAX turns into 32 bits by "
            "default: call jax.config.update('jax_enable_x64', True) first, or use 32-bit dtypes"
        )


def _reusable(block: Block, donated: Sequence[bool]) -> list[int]:
    """Returns the donated inputs whose buffers an output can reuse."""
    free = collections.Counter((v.shape.sizes, v.dtype, v.layout) for v in block.outputs)
    indices = []
    for index, (value, is_donated) in enumerate(zip(block.inputs, donated, strict=False)):
        key = (value.shape.sizes, value.dtype, value.layout)
        if is_donated and free[key]:
            free[key] -= 1
            indices.append(index)
    return indices
