"""Time of a training step with experts, against the same steps written by hand in plain JAX.

The model is a small Mixtral: layers of causal attention and eight gated experts, of which a router
chooses two for each token. The baselines are `jax.jit` programs with shardings, in the three ways
in which MaxText writes experts:

- ragged: tokens sorted by expert, and `jax.lax.ragged_dot`; under `jax.shard_map` on a mesh. Where
  an axis splits the experts, all tokens along it are gathered, and results are reduce-scattered.
- dense: every expert computes every token; a weight of zero drops what was not asked for.
- einsum: products with one-hot tensors; an expert takes 1.25 times its share of a sequence.

The first two drop nothing, and neither does our `dispatch="sort"`, nor "peers", which is the same
with tokens sent to split experts. Our `dispatch="gather"` has the capacity of the third, and so has
"queues", which are peers with slots. All steps run in this process, in turn. What counts is the
ratio of the least times, and beside it that of the least processor times, which other processes
disturb less.

Run: python -m tests.benchmarks.expert_time
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl import nn

EXPERTS, CHOICES, CAPACITY, RATE = 8, 2, 1.25, 0.1
batch, length, embed, heads, kv, d_ff, layers, experts, routed = md.dims(
    batch=16, length=128, embed=256, heads=8, kv=32, d_ff=512, layers=2, experts=8, routed=8
)
CASES = {
    "one device": None,
    "data:8": "batch:data",
    "data:2,expert:4": "batch:data+expert?; experts:expert",
    "data:4,model:2": "batch:data; heads:model; d_ff:model",
}
DIMS = {
    "norm_1": (embed,),
    "norm_2": (embed,),
    "query": (embed, heads, kv),
    "key": (embed, heads, kv),
    "value": (embed, heads, kv),
    "out": (heads, kv, embed),
    "router": (embed, routed),
    "w_gate": (experts, embed, d_ff),
    "w_in": (experts, embed, d_ff),
    "w_out": (experts, d_ff, embed),
}
SHARES = {"heads": "model", "d_ff": "model", "experts": "expert"}


def problem():
    """Returns the weights, x and y as arrays of float32."""
    rng = np.random.default_rng(0)
    weights = {}
    for name, dims in DIMS.items():
        sizes = [layers.size, *(dim.size for dim in dims)]
        weights[name] = (0.02 * rng.normal(size=sizes)).astype(np.float32)
        if name.startswith("norm"):
            weights[name] = np.ones(sizes, np.float32)
    # A router with larger weights than those of a first step chooses unevenly, as a trained one.
    weights["router"] *= 10
    x, y = (rng.normal(size=(16, 128, 256)).astype(np.float32) for _ in range(2))
    return weights, x, y


class Experts(md.Module):
    """The gated experts of one layer."""

    w_gate: md.Tensor
    w_in: md.Tensor
    w_out: md.Tensor

    def __call__(self, x):
        return nn.gated_mlp(x, self.w_gate, self.w_in, self.w_out)


def block(way, x, w):
    """Returns one layer's result, in meshdsl."""
    h = nn.rms_norm(x, "embed", w["norm_1"])
    q, k, v = (md.einsum(h, w[name], over="embed") for name in ("query", "key", "value"))
    k, v = (t.rename(length="memory_length") for t in (k, v))
    x = x + md.einsum(md.attention(q, k, v, causal=True), w["out"], over=["heads", "kv"])
    h = nn.rms_norm(x, "embed", w["norm_2"])
    routing = nn.route(h, w["router"], CHOICES)
    own = Experts(w["w_gate"], w["w_in"], w["w_out"])
    return x + nn.moe(h, routing, own, **way), None


def ours(mesh_text, dispatch, peers=1, capacity=None):
    """Returns the compiled step and its arguments, in meshdsl."""
    way = {"dispatch": dispatch, "peers": peers}
    if capacity is not None:
        queues = EXPERTS if dispatch == "gather" else peers
        way["slots"] = int(capacity * length.size * CHOICES / queues)

    def step(weights, x, y):
        def loss(weights):
            out, _ = md.scan(partial(block, way), x, weights, dim="layers")
            return md.mean(md.square(out - y))

        value, gradient = md.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradient), value

    mesh = None if mesh_text == "one device" else mesh_text
    jitted = md.jit(step, mesh=mesh, layout=CASES[mesh_text], donate="weights")
    weights, x, y = problem()
    weights = {name: md.named(w, [layers, *DIMS[name]]) for name, w in weights.items()}
    x, y = (md.named(array, [batch, length, embed]) for array in (x, y))
    weights, loss = jitted(weights, x, y)
    compiled = next(iter(jitted._compiled.values()))
    places = compiled.executable.shardings[-2:]
    x, y = (
        md.NamedArray(jax.device_put(a.data, place), a.dims)
        for a, place in zip((x, y), places, strict=True)
    )
    return jitted, (weights, x, y), float(loss)


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def route(h, w):
    scores = jax.nn.softmax(jnp.einsum("...e,ek->...k", h, w["router"]), -1)
    weight, expert = lax.top_k(scores, CHOICES)
    return weight / weight.sum(-1, keepdims=True), expert


def by_ragged_dot(mesh, h, w):
    """Sorts the tokens of a device by expert."""
    axes = mesh.axis_names if mesh is not None else ()
    split, over_model = "expert" in axes, "model" in axes

    def local(h, w):
        weight, expert = route(h, w)
        rows = h.shape[0] * h.shape[1]
        flat, weight, expert = h.reshape(rows, -1), weight.reshape(-1), expert.reshape(-1)
        own = EXPERTS
        if split:
            flat, weight, expert = (
                lax.all_gather(a, "expert", tiled=True) for a in (flat, weight, expert)
            )
            own = w["w_in"].shape[0]
            expert = expert - lax.axis_index("expert") * own
            expert = jnp.where((expert >= 0) & (expert < own), expert, own)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=own)
        tokens = flat[order // CHOICES]
        gate = jax.nn.silu(lax.ragged_dot(tokens, w["w_gate"], sizes))
        made = lax.ragged_dot(gate * lax.ragged_dot(tokens, w["w_in"], sizes), w["w_out"], sizes)
        made = made[jnp.argsort(order)] * weight[:, None]
        made = made.reshape(flat.shape[0], CHOICES, -1).sum(1)
        if split:
            made = lax.psum_scatter(made, "expert", tiled=True)
        if over_model:
            made = lax.psum(made, "model")
        return made.reshape(h.shape)

    names = ("router", "w_gate", "w_in", "w_out")
    own = {name: w[name] for name in names}
    if mesh is None:
        return local(h, own)
    specs = {name: spec(mesh, DIMS[name]) for name in names}
    rows = P(tuple(a for a in ("data", "expert") if a in axes))
    return jax.shard_map(local, mesh=mesh, in_specs=(rows, specs), out_specs=rows)(h, own)


def by_all(mesh, h, w):
    """Computes all experts for all tokens."""
    weight, expert = route(h, w)
    weights = (jax.nn.one_hot(expert, EXPERTS) * weight[..., None]).sum(-2)
    gate = jax.nn.silu(jnp.einsum("ble,xef->blxf", h, w["w_gate"]))
    hidden = gate * jnp.einsum("ble,xef->blxf", h, w["w_in"]) * weights[..., None]
    return jnp.einsum("blxf,xfe->ble", hidden, w["w_out"])


def by_einsum(mesh, h, w):
    """Sends tokens to slots and back by products with one-hot tensors."""

    def at(array, *names):
        if mesh is None:
            return array
        return lax.with_sharding_constraint(array, NamedSharding(mesh, P(*names)))

    axes = mesh.axis_names if mesh is not None else ()
    rows = tuple(a for a in ("data", "expert") if a in axes)
    by_expert = "expert" if "expert" in axes else None
    weight, expert = route(h, w)
    slots = int(CAPACITY * h.shape[1] * CHOICES / EXPERTS)
    chosen = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32)  # [b, l, k, x]
    ordered = jnp.swapaxes(chosen, 1, 2).reshape(h.shape[0], -1, EXPERTS)
    place = (jnp.cumsum(ordered, 1) * ordered).reshape(h.shape[0], CHOICES, -1, EXPERTS)
    place = jnp.swapaxes(place, 1, 2).max(-1) - 1
    seated = jax.nn.one_hot(place, slots, dtype=h.dtype)  # a late token has no seat
    where = chosen.astype(h.dtype)
    mask = jnp.einsum("blkx,blks->blxs", where, seated)
    back = jnp.einsum("blkx,blks,blk->blxs", where, seated, weight)
    tokens = at(jnp.einsum("ble,blxs->xbse", h, mask), by_expert, "data" if axes else None)
    gate = jax.nn.silu(jnp.einsum("xbse,xef->xbsf", tokens, w["w_gate"]))
    hidden = gate * jnp.einsum("xbse,xef->xbsf", tokens, w["w_in"])
    made = jnp.einsum("xbsf,xfe->xbse", hidden, w["w_out"])
    made = at(made, by_expert, "data" if axes else None)
    return at(jnp.einsum("xbse,blxs->ble", made, back), rows)


def spec(mesh, dims):
    """Returns the sharding of a weight without its dim of layers."""
    axes = (SHARES.get(dim.name) for dim in dims)
    return P(*(axis if axis in mesh.axis_names else None for axis in axes))


def by_hand(mesh_text, mix):
    """Returns the compiled step and its arguments, in plain JAX."""
    weights, x, y = problem()
    mesh = None
    if mesh_text != "one device":
        sizes = md.Mesh.parse(mesh_text).sizes
        kinds = (AxisType.Auto,) * len(sizes)
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
        rows = P(tuple(a for a in ("data", "expert") if a in sizes))
        weights = {
            name: jax.device_put(w, NamedSharding(mesh, P(None, *spec(mesh, DIMS[name]))))
            for name, w in weights.items()
        }
        x, y = (jax.device_put(a, NamedSharding(mesh, rows)) for a in (x, y))
    else:
        weights, x, y = jax.tree.map(jnp.asarray, (weights, x, y))

    def layer(x, w):
        h = norm(x, w["norm_1"])
        q, k, v = (jnp.einsum("ble,ehk->blhk", h, w[n]) for n in ("query", "key", "value"))
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k) * kv.size**-0.5
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        shares = jax.nn.softmax(jnp.where(visible, scores, -1e9), -1)
        mixed = jnp.einsum("bhlm,bmhk->blhk", shares, v)
        x = x + jnp.einsum("blhk,hke->ble", mixed, w["out"])
        return x + mix(mesh, norm(x, w["norm_2"]), w), None

    def step(weights, x, y):
        def loss(weights):
            return jnp.mean((lax.scan(layer, x, weights)[0] - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradient), value

    shardings = jax.tree.map(lambda a: a.sharding, weights)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    weights, loss = jitted(weights, x, y)
    return jitted, (weights, x, y), float(loss)


PROGRAMS = {
    "sort": partial(ours, dispatch="sort"),
    "peers": partial(ours, dispatch="sort", peers=4),
    "gather": partial(ours, dispatch="gather", capacity=CAPACITY),
    "queues": partial(ours, dispatch="sort", peers=4, capacity=CAPACITY),
    "ragged": partial(by_hand, mix=by_ragged_dot),
    "dense": partial(by_hand, mix=by_all),
    "einsum": partial(by_hand, mix=by_einsum),
}
RATIOS = (
    *((mine, theirs) for mine in ("sort", "peers") for theirs in ("ragged", "dense")),
    *((mine, "einsum") for mine in ("sort", "gather", "queues")),
)


def timed(step, arguments):
    """Returns the time and the processor time of a step, and the next step's arguments."""
    start = time.perf_counter(), time.process_time()
    weights, loss = step(*arguments)
    jax.block_until_ready(jax.tree.leaves((weights, loss)))
    spent = time.perf_counter() - start[0], time.process_time() - start[1]
    return spent, (weights, *arguments[1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    chosen = arguments.program or list(PROGRAMS)
    for mesh in arguments.case or CASES:
        steps, state, losses = {}, {}, {}
        for name in chosen:
            steps[name], state[name], losses[name] = PROGRAMS[name](mesh)
        print(
            f"{mesh}: losses", {name: round(loss, 6) for name, loss in losses.items()}, flush=True
        )
        times = {name: [] for name in chosen}
        for number in range(arguments.steps + 1):
            for name in chosen if number % 2 else reversed(chosen):
                spent, state[name] = timed(steps[name], state[name])
                if number:
                    times[name].append(spent)
        for which, word in enumerate(("time", "processor time")):
            least = {name: min(spent[which] for spent in times[name]) for name in chosen}
            row = [f"{name} {1e3 * spent:.1f} ms" for name, spent in least.items()]
            row += [f"{a}/{b} {least[a] / least[b]:.3f}" for a, b in RATIOS if {a, b} <= {*least}]
            print(f"  {word}:", "  ".join(row), flush=True)


if __name__ == "__main__":
    main()
