"""A fused kernel of one's own: RMS normalisation as one Pallas kernel, with its gradient.

    python examples/fused_rms_norm.py --mesh_shape=data:4,model:2 --host_devices=8 \
        --layout='batch:data;length:model'

A new operation needs four things, all of them here: the dims of its results, its gradient, the dims
along which devices can work by themselves, and a function of one device's arrays. On a CPU Pallas
interprets the kernels; on a TPU or GPU they are compiled.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import meshdsl as md
from meshdsl import nn

ROWS = 8  # how many rows one step of a kernel reads

# 1. The kernels, for arrays of rows: [rows, width].


def forward_kernel(x, scale, y, *, eps):
    inverse = jax.lax.rsqrt(jnp.mean(x[...] * x[...], 1, keepdims=True) + eps)
    y[...] = x[...] * inverse * scale[...]


def backward_kernel(g, x, scale, dx, dscale, *, eps):
    inverse = jax.lax.rsqrt(jnp.mean(x[...] * x[...], 1, keepdims=True) + eps)
    unit, weighted = x[...] * inverse, g[...] * scale[...]
    dx[...] = (weighted - unit * jnp.mean(weighted * unit, 1, keepdims=True)) * inverse

    @pl.when(pl.program_id(0) == 0)
    def start():
        dscale[...] = jnp.zeros_like(dscale)

    dscale[...] += jnp.sum(g[...] * unit, 0, keepdims=True)


# 2. What one device does: the last dim of its arrays is the one that is normalised.


def in_rows(kernel, results, *arrays):
    """Runs a kernel over the rows of some arrays; vectors are there for every row."""
    width = arrays[0].shape[-1]
    rows = [a.reshape(-1, width) for a in arrays]
    count = rows[0].shape[0]
    rows = [a if a.shape[0] == 1 else jnp.pad(a, ((0, -count % ROWS), (0, 0))) for a in rows]

    def blocks(a):
        whole = a.shape[0] == 1
        return pl.BlockSpec((1 if whole else ROWS, width), lambda i: (0 if whole else i, 0))

    like = [rows[i] for i in results]
    found = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like],
        grid=(-(-count // ROWS),),
        in_specs=[blocks(a) for a in rows],
        out_specs=[blocks(a) for a in like],
        interpret=jax.default_backend() == "cpu",
    )(*rows)
    return tuple(
        out[: arrays[i].size // width].reshape(arrays[i].shape)
        for out, i in zip(found, results, strict=True)
    )


def forward(x, scale, *, eps):
    return in_rows(functools.partial(forward_kernel, eps=eps), [0], x, scale)


def backward(g, x, scale, *, eps):
    return in_rows(functools.partial(backward_kernel, eps=eps), [1, 2], g, x, scale)


# 3. The operations: dims, gradient, partition.


def normalised(x, scale, **_):
    """The dims of the result are those of x; scale must have the last of them."""
    if scale.dims != x.dims[-1:]:
        raise ValueError(f"scale must have the last dim of x, {x.dims[-1]}, not {scale.dims}")
    return x.dims


# The last dim is normalised, so it is whole; every other one may be split.
fused = md.primitive(
    "fused_rms_norm",
    shape=normalised,
    emitters={"jax": forward},
    gradient=lambda g, y, x, scale, *, eps: fused_gradient(g, x, scale, eps=eps),
    partition=lambda x, scale, *, eps: md.Partition(split=x.dims[:-1]),
)
# The gradient of scale is a sum over all other dims: where one is split, each device has a summand.
fused_gradient = md.primitive(
    "fused_rms_norm_gradient",
    shape=lambda g, x, scale, *, eps: [md.spec(t.dims, t.dtype) for t in (x, scale)],
    emitters={"jax": backward},
    partition=lambda g, x, scale, *, eps: md.Partition(sums=x.dims[:-1]),
)


# 4. The function that models call.


def rms_norm(x, over, scale, eps=1e-6):
    """As `nn.rms_norm`, over one dim."""
    last = [*x.dims.without([over]), x.dims.get(over)]
    return fused(x.transpose(last), scale, eps=eps).transpose(x.dims)


def main():
    parser = argparse.ArgumentParser(description="Compare a fused kernel with nn.rms_norm.")
    parser.add_argument("--mesh_shape", help="mesh axes and their sizes: data:4,model:2")
    parser.add_argument("--layout", default="", help="dims split over mesh axes: batch:data")
    parser.add_argument("--host_devices", type=int, help="make this many virtual CPU devices")
    given = parser.parse_args()
    if given.host_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.host_devices)

    batch, length, embed = md.dims(batch=8, length=16, embed=64)
    x = md.random.normal(md.random.key(0), [batch, length, embed])
    scale = md.random.uniform(md.random.key(1), [embed])

    def step(norm, x, scale):
        return md.value_and_grad(lambda x, s: md.sum(md.sin(norm(x, "embed", s))), (0, 1))(x, scale)

    results = []
    for norm in (nn.rms_norm, rms_norm):
        f = md.jit(functools.partial(step, norm), given.mesh_shape, given.layout)
        f(x, scale)
        start = time.perf_counter()
        value, gradients = f(x, scale)
        results.append([np.asarray(a) for a in (value, *gradients)])
        milliseconds = 1e3 * (time.perf_counter() - start)
        print(f"{norm.__module__}.{norm.__name__}: {float(value):.6f} in {milliseconds:.1f} ms")
    differences = [np.abs(one - other).max() for one, other in zip(*results, strict=True)]
    print(f"largest difference of value and gradients: {max(differences):.1e}")


if __name__ == "__main__":
    main()
