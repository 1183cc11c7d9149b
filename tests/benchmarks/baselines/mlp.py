"""A stack of MLPs that add to a stream, with FSDP and tensor parallelism."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.benchmarks.baselines.parts import (
    Array,
    Size,
    adamw,
    cast,
    compute_dtype,
    constrain,
    rms_norm,
    stacked,
    training,
)


def mlp_fsdp_tensor(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axes data and model; there is no attention, and so no kernel."""
    del kernels
    layers, embed, d_ff, rows = (8, 4096, 16384, 8192) if size == "tpu" else (2, 256, 1024, 256)
    dtype = compute_dtype(size)
    weights = {
        "scale": Array((embed,), P("data")),
        "w_in": Array((embed, d_ff), P("data", "model")),
        "w_out": Array((d_ff, embed), P("model", "data")),
    }

    def layer(x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        w = cast(w, dtype)
        h = constrain(rms_norm(x, w["scale"]) @ w["w_in"], mesh, "data", "model")
        return constrain(x + jax.nn.gelu(h) @ w["w_out"], mesh, "data"), None

    def loss(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
        x = constrain(batch["x"].astype(dtype), mesh, "data")
        x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)
        return jnp.mean(jnp.square(x.astype(jnp.float32) - batch["y"]))

    one = Array((rows, embed), P("data"))
    return training(mesh, loss, stacked(layers, weights), {"x": one, "y": one}, adamw())
