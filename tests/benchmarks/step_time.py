"""Time of a training step, against the same step written by hand with jax.jit and NamedSharding.

Both run in this process, in turn, on the problem of `tests.reference.transformer_block`; what
counts is the median of the ratios of neighbouring steps. Run: python -m tests.benchmarks.step_time
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from tests.reference import transformer_block as problem

CASES = {
    "data:2,model:4": "batch:data; heads:model; d_ff:model",
    "data:8": "batch:data",
    "one device": None,
}
SPECS = {
    "query": P(None, None, "model"),
    "key": P(None, None, "model"),
    "value": P(None, None, "model"),
    "out": P(None, "model"),
    "w_in": P(None, None, "model"),
    "w_out": P(None, "model"),
    "norm_1": P(),
    "norm_2": P(),
}


def by_hand(mesh_text):
    """Returns the compiled step and its arguments, in plain JAX."""
    blocks, x, y = problem.problem()
    weights = {name: jnp.asarray(getattr(blocks, name).data) for name in SPECS}
    x, y = jnp.asarray(x.data), jnp.asarray(y.data)
    if mesh_text != "one device":
        mesh = md.Mesh.parse(mesh_text)
        sizes = tuple(mesh.sizes.values())
        devices = jax.make_mesh(sizes, mesh.names, axis_types=(AxisType.Auto,) * len(sizes))
        model = "model" in mesh.names

        def place(array, spec):
            return jax.device_put(array, NamedSharding(devices, spec if model else P()))

        weights = {name: place(array, SPECS[name]) for name, array in weights.items()}
        x, y = (jax.device_put(a, NamedSharding(devices, P("data"))) for a in (x, y))

    def norm(x, scale):
        centred = x - jnp.mean(x, -1, keepdims=True)
        var = jnp.mean(centred**2, -1, keepdims=True)
        return centred * jax.lax.rsqrt(var + 1e-5) * scale

    def layer(x, w):
        h = norm(x, w["norm_1"])
        q, k, v = (jnp.einsum("bte,ehk->bthk", h, w[n]) for n in ("query", "key", "value"))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * problem.kv.size**-0.5
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), -1)
        mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
        x = x + jnp.einsum("bthk,hke->bte", mixed, w["out"])
        return x + jax.nn.gelu(norm(x, w["norm_2"]) @ w["w_in"]) @ w["w_out"], None

    def step(weights, x, y):
        def loss(weights):
            return jnp.mean((jax.lax.scan(layer, x, weights)[0] - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - problem.RATE * g, weights, gradient), value

    shardings = jax.tree.map(lambda a: a.sharding, weights)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)), (weights, x, y)


def ours(mesh_text):
    """Returns the compiled step and its arguments, in meshdsl."""
    mesh = None if mesh_text == "one device" else mesh_text
    step = md.jit(problem.train_step, mesh=mesh, layout=CASES[mesh_text], donate="blocks")
    blocks, x, y = problem.problem()
    blocks, _ = step(blocks, x, y)
    return step, (blocks, *placed(step, x, y))


def placed(step, *arrays):
    """Puts the batch where the program wants it, as a data loader would."""
    compiled = next(iter(step._compiled.values()))
    shardings = compiled.executable.shardings[-len(arrays) :]
    return [
        md.NamedArray(jax.device_put(a.data, s), a.dims)
        for a, s in zip(arrays, shardings, strict=True)
    ]


def timed(step, arguments):
    start = time.perf_counter()
    weights, loss = step(*arguments)
    jax.block_until_ready(jax.tree.leaves((weights, loss)))
    return time.perf_counter() - start, (weights, *arguments[1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    for mesh in CASES:
        a, mine = ours(mesh)
        b, theirs = by_hand(mesh)
        for _ in range(3):
            _, mine = timed(a, mine)
            _, theirs = timed(b, theirs)
        pairs = []
        for number in range(arguments.steps):
            if number % 2:
                y, theirs = timed(b, theirs)
                x, mine = timed(a, mine)
            else:
                x, mine = timed(a, mine)
                y, theirs = timed(b, theirs)
            pairs.append((x, y))
        ratio = statistics.median(x / y for x, y in pairs)
        x, y = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        low, high = np.quantile([x / y for x, y in pairs], [0.25, 0.75])
        print(
            f"{mesh:16s} meshdsl {x:7.1f} ms   by hand {y:7.1f} ms   "
            f"ratio {ratio:.3f} (quartiles {low:.3f} to {high:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
