"""A recommender: tables on different devices, by all_to_all, and updates of the rows in use alone.

Every device has whole tables. The rows' numbers travel to the devices of their tables, and the rows
travel back to the devices of the batch (Naumov et al. 2019, "Deep learning recommendation model",
section 4). The gradient is by the rows that were looked up, so plain gradient descent adds these to
the tables in place: no gradient is as large as a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.benchmarks.baselines.parts import Array, Size, cast, compute_dtype, shardings

RATE = 0.1


@dataclass(frozen=True)
class Recommender:
    """Sizes."""

    tables: int
    rows: int
    features: int
    dense: int
    bottom: int
    top: int
    batch: int


def sized(size: Size) -> Recommender:
    """Returns the sizes."""
    if size == "tpu":
        return Recommender(64, 2**20, 128, 512, 1024, 1024, 65536)
    return Recommender(8, 128, 16, 32, 64, 64, 64)


def weights(c: Recommender) -> dict[str, Array]:
    """Returns all weights; only the tables are split."""
    vectors = c.tables + 1
    return {
        "tables": Array((c.tables, c.rows, c.features), P("data")),
        "bottom_in": Array((c.dense, c.bottom), P()),
        "bottom_out": Array((c.bottom, c.features), P()),
        "top_in": Array((vectors, vectors, c.top), P()),
        "top_dense": Array((c.features, c.top), P()),
        "top_middle": Array((c.top, c.top), P()),
        "top_out": Array((c.top,), P()),
    }


def look_up(mesh: Mesh, dtype: Any, tables: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the rows [batch, tables, features] of some numbers [batch, tables]."""

    def local(tables: jax.Array, rows: jax.Array) -> jax.Array:
        wanted = lax.all_to_all(rows, "data", split_axis=1, concat_axis=0, tiled=True)
        found = jax.vmap(lambda table, at: table[at], in_axes=(0, 1), out_axes=1)(tables, wanted)
        return lax.all_to_all(found.astype(dtype), "data", split_axis=0, concat_axis=1, tiled=True)

    split = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    return split(tables, rows)


def updated(mesh: Mesh, tables: jax.Array, rows: jax.Array, grads: jax.Array) -> jax.Array:
    """Returns the tables after a step; `grads` are those of the rows [batch, tables, features]."""

    def local(tables: jax.Array, rows: jax.Array, grads: jax.Array) -> jax.Array:
        rows, grads = (
            lax.all_to_all(one, "data", split_axis=1, concat_axis=0, tiled=True)
            for one in (rows, grads)
        )
        steps = -RATE * grads.astype(tables.dtype)
        add = jax.vmap(lambda table, at, step: table.at[at].add(step), in_axes=(0, 1, 1))
        return add(tables, rows, steps)

    specs = (P("data"), P("data"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))(tables, rows, grads)


def scores(w: Mapping[str, jax.Array], looked_up: jax.Array, dense: jax.Array) -> jax.Array:
    """Returns the scores of a batch."""
    x = jax.nn.relu(jax.nn.relu(dense @ w["bottom_in"]) @ w["bottom_out"])
    vectors = jnp.concatenate([x[:, None], looked_up], axis=1)
    products = jnp.einsum("bvf,bof->bvo", vectors, vectors)
    h = jnp.einsum("bvo,vot->bt", products, w["top_in"]) + x @ w["top_dense"]
    return jax.nn.relu(jax.nn.relu(h) @ w["top_middle"]) @ w["top_out"]


def recommender(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axis data, of the batch and of the tables; there is no attention, and so no kernel."""
    del kernels
    c, dtype = sized(size), compute_dtype(size)

    def loss(others: Any, looked_up: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        made = scores(cast(others, dtype), looked_up, batch["dense"].astype(dtype))
        made = made.astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(made) - made * batch["click"])

    def step(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Any]:
        others = dict(state["params"])
        tables = others.pop("tables")
        looked_up = look_up(mesh, dtype, tables, batch["row"])
        value, (grads, of_rows) = jax.value_and_grad(loss, (0, 1))(others, looked_up, batch)
        params = jax.tree.map(lambda p, g: p - RATE * g, others, grads)
        params["tables"] = updated(mesh, tables, batch["row"], of_rows)
        return {"params": params}, {"loss": value}

    state = {"params": {name: one.on(mesh) for name, one in weights(c).items()}}
    batch = {
        "row": Array((c.batch, c.tables), P("data"), jnp.int32),
        "dense": Array((c.batch, c.dense), P("data")),
        "click": Array((c.batch,), P("data")),
    }
    results = (shardings(state), NamedSharding(mesh, P()))
    function = jax.jit(step, donate_argnums=0, out_shardings=results)
    return function, state, {name: one.on(mesh) for name, one in batch.items()}
