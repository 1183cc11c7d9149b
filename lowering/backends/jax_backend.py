"""The JAX backend: one `jax.shard_map` with the program's collectives written out.

`function` is the program as a plain JAX function of global arrays; `Executable` is that function
compiled for the mesh, with its inputs placed and its donated buffers reused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshdsl.dims import Shape
from meshdsl.dtypes import is_float
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.backends.arrange import NUMPY_NAMES, alignment, equation
from meshdsl.lowering.backends.threefry import threefry2x32
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.mesh import Mesh

Arrays = Sequence[jax.Array]
Emitter = Callable[[Instruction, Arrays], Any]


class Executable:
    """A program compiled for the devices of its mesh.

    Args:
        donated: per input, whether its buffer may be reused for an output.

    Raises:
        ValueError: the mesh needs more devices than there are, or a dtype needs 64-bit mode.
    """

    def __init__(self, program: SpmdProgram, donated: Sequence[bool] = ()) -> None:
        self.program = program
        block = program.block
        mesh = device_mesh(program.mesh)
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
        return self.compiled(*placed)

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

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(run(block, arrays))

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
    found = sorted(wide & {"float64", "int64", "uint64"})
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


def run(block: Block, inputs: Arrays) -> list[jax.Array]:
    """Emits a block on one device's arrays."""
    held: dict[Value, Any] = dict(zip(block.inputs, inputs, strict=True))
    for instruction in block.instructions:
        results = EMITTERS[instruction.op](instruction, [held[v] for v in instruction.inputs])
        if len(instruction.outputs) == 1 and not isinstance(results, list | tuple):
            results = (results,)
        held.update(zip(instruction.outputs, results, strict=True))
    return [held[v] for v in block.outputs]


def _align(array: Any, have: Shape, want: Shape) -> Any:
    order, sizes = alignment(have, want)
    if order != tuple(range(len(order))):
        array = array.transpose(order)
    return array if array.shape == sizes else array.reshape(sizes)


def _elementwise(compute: Callable[..., Any]) -> Emitter:
    def emit(instruction: Instruction, inputs: Arrays) -> Any:
        (out,) = instruction.outputs
        aligned = [
            a if not v.shape else _align(a, v.local, out.local)
            for a, v in zip(inputs, instruction.inputs, strict=True)
        ]
        result = compute(*aligned)
        return jnp.broadcast_to(result, out.local.sizes)

    return emit


def _reduction(compute: Callable[..., Any]) -> Emitter:
    def emit(instruction: Instruction, inputs: Arrays) -> Any:
        local = instruction.inputs[0].local
        at = tuple(local.position(n) for n in instruction.params["over"])
        return compute(inputs[0], axis=at).astype(inputs[0].dtype)

    return emit


def _full(instruction: Instruction, inputs: Arrays) -> Any:
    (out,) = instruction.outputs
    value = np.asarray(instruction.params["value"]).astype(out.dtype)
    return value if not out.shape else lax.full(out.local.sizes, value, out.dtype)


def _device_index(instruction: Instruction, inputs: Arrays) -> Any:
    return _index(instruction.params["axes"])


def _index(axes: Sequence[str]) -> Any:
    found = jnp.int32(0)
    for axis in axes:
        found = found * lax.axis_size(axis) + lax.axis_index(axis)
    return found.astype(jnp.int32)


def _einsum(instruction: Instruction, inputs: Arrays) -> Any:
    shapes = [v.local for v in instruction.inputs]
    return jnp.einsum(equation(shapes, instruction.outputs[0].local), *inputs)


def _broadcast(instruction: Instruction, inputs: Arrays) -> Any:
    (out,) = instruction.outputs
    aligned = _align(inputs[0], instruction.inputs[0].local, out.local)
    return jnp.broadcast_to(aligned, out.local.sizes)


def _take(instruction: Instruction, inputs: Arrays) -> Any:
    table, indices = inputs
    rows = instruction.inputs[0].local
    at = rows.position(instruction.params["dim"])
    inside = jnp.where(indices < 0, rows[at].size, indices)
    found = jnp.take(table, inside, axis=at, mode="fill", fill_value=0)
    if at == 0:
        return found
    moved = tuple(range(at, at + indices.ndim))
    return jnp.moveaxis(found, moved, tuple(range(indices.ndim)))


def _scatter_add(instruction: Instruction, inputs: Arrays) -> Any:
    updates, indices = inputs
    (out,) = instruction.outputs
    at = out.local.position(instruction.params["dim"])
    rest = out.local.without([instruction.params["dim"]])
    ordered = Shape([*instruction.inputs[1].local, *rest])
    updates = _align(updates, instruction.inputs[0].local, ordered)
    rows = out.local[at].size
    zeros = jnp.zeros((rows, *rest.sizes), out.dtype)
    inside = jnp.where(indices < 0, rows, indices)
    return jnp.moveaxis(zeros.at[inside].add(updates, mode="drop"), 0, at)


def _threefry(instruction: Instruction, inputs: Arrays) -> Any:
    key, high, low = inputs
    shape = instruction.outputs[0].local.without(["random_key"])
    high, low = (
        jnp.broadcast_to(_align(a, v.local, shape), shape.sizes)
        for a, v in zip((high, low), instruction.inputs[1:], strict=True)
    )
    first, second = threefry2x32(key[0], key[1], high, low)
    return jnp.stack([first, second], -1) if instruction.params["pairs"] else first ^ second


def _slice(instruction: Instruction, inputs: Arrays) -> Any:
    if not instruction.params["axes"]:
        return inputs[0]
    (out,) = instruction.outputs
    at = out.local.position(instruction.params["dim"])
    size = out.local[at].size
    start = _index(instruction.params["axes"]) * size
    return lax.dynamic_slice_in_dim(inputs[0], start, size, at)


def _scan(instruction: Instruction, inputs: Arrays) -> Any:
    params = instruction.params
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    fixed = list(inputs[:consts])
    stacked = [
        jnp.moveaxis(a, v.local.position(dim), 0)
        for a, v in zip(
            inputs[consts + carries :], instruction.inputs[consts + carries :], strict=True
        )
    ]

    def body(carry: Any, slices: Any) -> Any:
        results = run(params["body"], [*fixed, *carry, *slices])
        results = [jnp.asarray(r) for r in results]
        return results[:carries], results[carries:]

    start = [jnp.asarray(a) for a in inputs[consts : consts + carries]]
    carry, ys = lax.scan(body, start, stacked, length=params["length"], reverse=params["reverse"])
    return [*carry, *ys]


# The collectives.


def _at(instruction: Instruction, dim: str) -> int:
    return instruction.inputs[0].local.position(instruction.params[dim])


def _all_reduce(instruction: Instruction, inputs: Arrays) -> Any:
    (x,), axes, kind = inputs, instruction.params["axes"], instruction.params["kind"]
    if kind == "sum":
        return lax.psum(x, axes)
    reduce = {"max": lax.pmax, "min": lax.pmin}[kind]
    if not is_float(instruction.inputs[0].dtype):
        return reduce(x, axes)
    return _from_key(reduce(_to_key(x, kind), axes), x.dtype)


def _to_key(x: Any, kind: str) -> Any:
    """Returns integers in the order of the numbers, with NaN winning.

    XLA's reductions between devices may drop NaN, its local ones do not.
    """
    limits = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    key = _flip(lax.bitcast_convert_type(x, limits.dtype))
    return jnp.where(jnp.isnan(x), limits.max if kind == "max" else limits.min, key)


def _from_key(key: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(_flip(key), dtype)


def _flip(bits: Any) -> Any:
    """Turns the bits of floats into integers that order like them, and back."""
    return bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & jnp.iinfo(bits.dtype).max)


def _reduce_scatter(instruction: Instruction, inputs: Arrays) -> Any:
    axes, at = instruction.params["axes"], _at(instruction, "dim")
    return lax.psum_scatter(inputs[0], axes, scatter_dimension=at, tiled=True)


def _all_gather(instruction: Instruction, inputs: Arrays) -> Any:
    axes, at = instruction.params["axes"], _at(instruction, "dim")
    return lax.all_gather(inputs[0], axes, axis=at, tiled=True)


def _all_to_all(instruction: Instruction, inputs: Arrays) -> Any:
    axes = instruction.params["axes"]
    split, concat = _at(instruction, "split"), _at(instruction, "concat")
    return lax.all_to_all(inputs[0], axes, split_axis=split, concat_axis=concat, tiled=True)


def _permute(instruction: Instruction, inputs: Arrays) -> Any:
    return lax.ppermute(inputs[0], instruction.params["mesh_axes"], instruction.params["pairs"])


EMITTERS: Mapping[str, Emitter] = {
    **{name: _elementwise(getattr(jnp, name)) for name in NUMPY_NAMES},
    "round": _elementwise(jnp.round),
    "rsqrt": _elementwise(lax.rsqrt),
    "sigmoid": _elementwise(lax.logistic),
    "erf": _elementwise(lax.erf),
    "shift_right": lambda instruction, inputs: lax.shift_right_logical(
        inputs[0], inputs[0].dtype.type(instruction.params["places"])
    ),
    "select": _elementwise(jnp.where),
    "cast": lambda instruction, inputs: jnp.asarray(inputs[0]).astype(instruction.outputs[0].dtype),
    "sum": _reduction(jnp.sum),
    "max": _reduction(jnp.max),
    "min": _reduction(jnp.min),
    "full": _full,
    "literal": lambda instruction, inputs: instruction.params["data"],
    "iota": lambda instruction, inputs: lax.iota(np.int32, instruction.outputs[0].local[0].size),
    "device_index": _device_index,
    "einsum": _einsum,
    "reshape": lambda instruction, inputs: jnp.reshape(
        inputs[0], instruction.outputs[0].local.sizes
    ),
    "rename": lambda instruction, inputs: inputs[0],
    "transpose": lambda instruction, inputs: _align(
        inputs[0], instruction.inputs[0].local, instruction.outputs[0].local
    ),
    "broadcast": _broadcast,
    "barrier": lambda instruction, inputs: lax.optimization_barrier(tuple(inputs)),
    "take": _take,
    "scatter_add": _scatter_add,
    "threefry2x32": _threefry,
    "slice": _slice,
    "scan": _scan,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
