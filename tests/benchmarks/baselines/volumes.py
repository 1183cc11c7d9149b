"""A 3-D U-Net whose volumes are split along two dims, with halos by hand.

XLA's partitioner knows convolutions of split dims, but moves far more than halos. So the model runs
inside of shard_map: a convolution first gets one layer of voxels from either neighbour, and a group
norm adds up the sums of all parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
    cross_entropy,
    training,
)

SPLIT = ("row", "column")  # the axes of depth and height
DIMS = ("NDHWC", "DHWIO", "NDHWC")


@dataclass(frozen=True)
class Volumes:
    """Sizes; each level has twice the filters of the one above, and half the voxels each way."""

    filters: int
    levels: int
    groups: int
    batch: int
    side: int
    classes: int = 3


def weights(c: Volumes) -> dict[str, Any]:
    """Returns all weights, from the finest level to the coarsest; every device has them."""

    def convolution(before: int, after: int, kernel: int, normed: bool = True) -> dict[str, Any]:
        each = Array((after,), P())
        norm = {"norm": {"scale": each, "bias": each}} if normed else {"bias": each}
        return {"weights": Array((kernel, kernel, kernel, before, after), P()), **norm}

    def level(before: int, after: int) -> dict[str, Any]:
        return {"first": convolution(before, after, 3), "second": convolution(after, after, 3)}

    sizes = [c.filters * 2**number for number in range(c.levels)]
    return {
        "down": [level(a, b) for a, b in zip([1, *sizes], sizes, strict=False)],
        "up": [convolution(2 * fine, fine, 2, normed=False) for fine in sizes[:-1]],
        "merged": [level(2 * fine, fine) for fine in sizes[:-1]],
        "out": convolution(c.filters, c.classes, 1, normed=False),
    }


def with_halo(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """Returns x with the neighbours' layers next to it along a dim; zeros at the ends."""
    count, size = lax.axis_size(axis), x.shape[dim]
    up = [(number, number + 1) for number in range(count - 1)]
    down = [(after, before) for before, after in up]
    before = lax.ppermute(lax.slice_in_dim(x, size - 1, size, axis=dim), axis, up)
    after = lax.ppermute(lax.slice_in_dim(x, 0, 1, axis=dim), axis, down)
    return jnp.concatenate([before, x, after], axis=dim)


def normed(c: Volumes, x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    """Returns x with mean 0 and variance 1 in each group of channels of a volume."""
    wide = x.astype(jnp.float32)
    channels = x.shape[-1]
    groups = next(n for n in range(min(c.groups, channels), 0, -1) if channels % n == 0)

    # Sums of numbers and of their squares are made in one pass, and sent together.
    of_channels = jnp.stack([jnp.mean(one, axis=(1, 2, 3)) for one in (wide, jnp.square(wide))])
    of_channels = lax.pmean(of_channels, SPLIT)  # 2, batch, channels
    grouped = of_channels.reshape(2, -1, groups, channels // groups)
    mean, square = jnp.repeat(jnp.mean(grouped, axis=-1), channels // groups, axis=-1)
    factor = lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0) + 1e-5)
    mean, factor = (one[:, None, None, None] for one in (mean, factor))
    y = (wide - mean) * factor
    return y.astype(x.dtype) * w["scale"] + w["bias"]


def level(c: Volumes, x: jax.Array, w: Mapping[str, Any]) -> jax.Array:
    """Returns what two convolutions make of x."""
    for name in ("first", "second"):
        halo = with_halo(with_halo(x, 1, "row"), 2, "column")
        x = lax.conv_general_dilated(
            halo,
            w[name]["weights"],
            (1, 1, 1),
            ((0, 0), (0, 0), (1, 1)),
            dimension_numbers=DIMS,
        )
        x = jax.nn.relu(normed(c, x, w[name]["norm"]))
    return x


def pooled(x: jax.Array) -> jax.Array:
    """Returns the largest of each 2 * 2 * 2 voxels."""
    n, depth, height, width, channels = x.shape
    parts = x.reshape(n, depth // 2, 2, height // 2, 2, width // 2, 2, channels)
    return jnp.max(parts, axis=(2, 4, 6))


def enlarged(x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
    """Returns a transposed convolution with stride 2: every voxel makes 2 * 2 * 2 of its own."""
    made = jnp.einsum("ndhwi,abcio->ndahbwco", x, w["weights"])
    n, depth, _, height, _, width, _, channels = made.shape
    return made.reshape(n, 2 * depth, 2 * height, 2 * width, channels) + w["bias"]


def local_loss(
    c: Volumes, dtype: Any, params: Mapping[str, Any], batch: Mapping[str, jax.Array]
) -> jax.Array:
    """Returns the mean loss of all voxels, computed from those of one device."""
    w, x = cast(params, dtype), batch["volume"].astype(dtype)
    passed = []
    for one in w["down"][:-1]:
        x = level(c, x, one)
        passed.append(x)
        x = pooled(x)
    x = level(c, x, w["down"][-1])
    for above, up, merged in reversed(list(zip(passed, w["up"], w["merged"], strict=True))):
        x = level(c, jnp.concatenate([above, enlarged(x, up)], axis=-1), merged)
    logits = x @ w["out"]["weights"][0, 0, 0] + w["out"]["bias"]
    return lax.pmean(jnp.mean(cross_entropy(logits, batch["label"])), ("data", *SPLIT))


def volumes(mesh: Mesh, size: Size = "tpu", kernels: bool = True) -> tuple[Any, Any, Any]:
    """Axes data, row and column; there is no attention, and so no kernel."""
    del kernels
    c = Volumes(32, 4, 8, 8, 128) if size == "tpu" else Volumes(8, 2, 4, 4, 8)
    space = (c.batch, c.side, c.side, c.side)
    split = P("data", *SPLIT)
    batch = {"volume": Array((*space, 1), split), "label": Array(space, split, jnp.int32)}
    loss = jax.shard_map(
        partial(local_loss, c, compute_dtype(size)),
        mesh=mesh,
        in_specs=(P(), {name: split for name in batch}),
        out_specs=P(),
    )
    return training(mesh, loss, weights(c), batch, adamw())
