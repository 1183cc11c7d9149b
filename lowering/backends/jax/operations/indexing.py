"""Gather by index (take) and scatter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.lowering.backends.common.arrange import permutation
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Indexed, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity, is_float


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns the positions of a table at indices; zeros for indices outside of it."""
    table, indices = (v.local for v in instruction.inputs)
    (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
    dim, shared = params["dim"], params["pairs"]
    rows, index_dims = table.without(shared), indices.without(shared)
    at, size = rows.position(dim), rows.get(dim).size

    def gather(rows: Any, index: Any) -> Any:
        # JAX would count negative indices from the end.
        positions = jnp.where(index < 0, size, index)
        return jnp.take(rows, positions, axis=at, mode="fill", fill_value=0)

    for _ in shared:
        gather = jax.vmap(gather)
    result = gather(
        jnp.transpose(inputs[0], permutation(table.names, [*shared, *rows.names])),
        jnp.transpose(inputs[1], permutation(indices.names, [*shared, *index_dims.names])),
    )
    names = [*shared, *rows.names[:at], *index_dims.names, *rows.names[at + 1 :]]
    return jnp.transpose(result, permutation(names, out.local.names))


def _scatter(method: str, kind: str) -> Emitter:
    """Returns the emitter of a scatter; indices outside of the dim are dropped."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        updates, indices = (v.local for v in instruction.inputs)
        (out,), params = instruction.outputs, parameters_of(instruction, Indexed)
        dim, shared = params["dim"], params["pairs"]
        index_dims, rest = indices.without(shared), out.local.without([dim, *shared])
        size = out.local.get(dim).size
        half = kind == "sum" and is_float(out.dtype) and out.dtype.itemsize < 4
        # Half precision would round many small summands away.
        sum_dtype = np.dtype("float32") if half else out.dtype
        blank = np.asarray(identity(kind, out.dtype)).astype(sum_dtype)

        def scatter(updates: Any, index: Any) -> Any:
            rows = jnp.full((size, *rest.sizes), blank)
            at = rows.at[jnp.where(index < 0, size, index)]
            return getattr(at, method)(updates.astype(sum_dtype), mode="drop").astype(out.dtype)

        for _ in shared:
            scatter = jax.vmap(scatter)
        result = scatter(
            jnp.transpose(
                inputs[0], permutation(updates.names, [*shared, *index_dims.names, *rest.names])
            ),
            jnp.transpose(inputs[1], permutation(indices.names, [*shared, *index_dims.names])),
        )
        return jnp.transpose(result, permutation([*shared, dim, *rest.names], out.local.names))

    return emit


EMITTERS: Mapping[str, Emitter] = {
    "take": _take,
    "scatter_add": _scatter("add", "sum"),
    "scatter_max": _scatter("max", "max"),
    "scatter_min": _scatter("min", "min"),
}
