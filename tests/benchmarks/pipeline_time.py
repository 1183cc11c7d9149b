"""Time of a step as a pipeline, against GPipe by differentiating a loop, written by hand in JAX.

The baseline is what JAX projects do (praxis, MaxText): inside of shard_map, a scan over m + p - 1
ticks runs each stage's layers and sends the result on; jax.grad differentiates the scan, and
jax.checkpoint keeps the inputs of stages only. The embedding is computed by all stages, the loss by
each for its share of the microbatches. Both run in this process, in turn, with the numbers of
gpt_mini; what counts is the median of the ratios of neighbouring steps.

On the virtual devices of one machine all stages share its cores: a step takes the time of all that
is computed, in bubbles too, and sending is a copy.

Run: python -m tests.benchmarks.pipeline_time [--steps=10] [--microbatches=8] [--remat=none]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.models import load
from meshdsl.optim import Sgd
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.benchmarks.baselines.parts import attention, cross_entropy, rms_norm, rotary

STAGES = 4
BATCH, LENGTH = 16, 128
RATE = 0.1
WARM_UP = 2


def model_of(layers: int, remat: str) -> Any:
    """Returns gpt_mini with another number of layers."""
    return load("gpt_mini", f"layers={layers},remat={remat}")


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """Returns what a layer of gpt_mini leaves: [batch, length, embed]."""
    h = rms_norm(x, w["attention_norm"])
    q, k = (jnp.einsum("ble,ehk->blhk", h, w[name]) for name in ("query", "key"))
    v = jnp.einsum("ble,ehk->blhk", h, w["value"])
    mixed = attention(rotary(q[:, :, :, None]), rotary(k), v, True)[:, :, :, 0]
    x = x + jnp.einsum("blhk,hke->ble", mixed, w["out"])
    h = rms_norm(x, w["mlp_norm"])
    return x + jax.nn.gelu(h @ w["w_in"]) @ w["w_out"], None


def pipelined_loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean loss of all microbatches, on each device of the axis `pipe`.

    Args:
        tokens, targets: [microbatch, batch, length].
    """
    stage, count = lax.axis_index("pipe"), tokens.shape[0]
    blocks = params["blocks"]

    @jax.checkpoint
    def chunk(x: jax.Array) -> jax.Array:
        return lax.scan(layer, x, blocks)[0]

    def tick(arrived: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = tokens[jnp.minimum(number, count - 1)]
        entering = jnp.take(params["embedding"], row, axis=0)
        y = chunk(jnp.where(stage == 0, entering, arrived))
        ring = [(s, (s + 1) % STAGES) for s in range(STAGES)]
        return lax.ppermute(y, "pipe", ring), y

    nothing = jnp.zeros((*tokens.shape[1:], params["embedding"].shape[1]))
    _, ys = lax.scan(tick, nothing, jnp.arange(count + STAGES - 1))
    last = jnp.where(stage == STAGES - 1, ys[STAGES - 1 :], 0.0)
    # Each device computes the loss of its share of the microbatches.
    x = lax.psum_scatter(last, "pipe", scatter_dimension=0, tiled=True)
    own = lax.dynamic_slice_in_dim(targets, stage * x.shape[0], x.shape[0])
    x = rms_norm(x, params["final_norm"])
    logits = jnp.einsum("mble,ve->mblv", x, params["embedding"])
    return lax.pmean(jnp.mean(cross_entropy(logits, own)), "pipe")


def by_hand(params: Any, batch: Any, microbatches: int) -> Callable[[], tuple[Any, float]]:
    """Returns a function that runs one step of the baseline: (parameters, loss)."""
    mesh = jax.make_mesh(
        (STAGES,),
        ("pipe",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:STAGES],
    )
    specs = {"embedding": P(), "final_norm": P(), "blocks": P("pipe")}
    whole = {name: specs[name] for name in params}
    loss = jax.shard_map(
        pipelined_loss, mesh=mesh, in_specs=(whole, P(), P()), out_specs=P(), check_vma=False
    )

    @jax.jit
    def step(params: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    # Microbatches are every m-th row, as ours are.
    rows = {k: np.asarray(v).reshape(BATCH // microbatches, microbatches, LENGTH).swapaxes(0, 1)
            for k, v in batch.items()}  # fmt: skip
    state = {"params": params}

    def run() -> tuple[Any, float]:
        state["params"], value = step(state["params"], rows["tokens"], rows["targets"])
        jax.block_until_ready(state["params"])
        return state["params"], float(value)

    return run


def ours(model: Any, state: Any, batch: Any, microbatches: int) -> Callable[[], tuple[Any, float]]:
    """Returns a function that runs one step of ours: (state, loss)."""
    step = make_train_step(model.loss, Sgd(RATE), microbatches=microbatches)
    jitted = md.jit(step, f"pipe:{STAGES}", "layers:pipe", donate="state")
    spec = spec_of(create(model.init, Sgd(RATE)))
    compiled = jitted.lower(spec, model.batch_spec(BATCH, LENGTH)).compile()
    kept = {"state": state}

    def run() -> tuple[Any, float]:
        kept["state"], metrics = compiled(kept["state"], batch)
        jax.block_until_ready(jax.tree.leaves(kept["state"]))
        return kept["state"], float(metrics["loss"])

    return run


def weights_of(params: Any) -> Any:
    """Returns the parameters of gpt_mini as the baseline has them."""
    blocks = params.blocks
    arrays = {
        "attention_norm": blocks.attention_norm.scale,
        "query": blocks.attention.query,
        "key": blocks.attention.key,
        "value": blocks.attention.value,
        "out": blocks.attention.out,
        "mlp_norm": blocks.mlp_norm.scale,
        "w_in": blocks.mlp.w_in,
        "w_out": blocks.mlp.w_out,
    }
    return {
        "embedding": np.asarray(params.embedding),
        "final_norm": np.asarray(params.final_norm.scale),
        "blocks": {name: np.asarray(array) for name, array in arrays.items()},
    }


def problem(layers: int, microbatches: int, remat: str) -> tuple[Any, Any]:
    """Returns both steps, of the same parameters and batch."""
    model = model_of(layers, remat)
    init = md.jit(create(model.init, Sgd(RATE)), f"pipe:{STAGES}", "layers:pipe")
    state = init(md.random.key(0))
    rng = np.random.default_rng(0)
    batch = {
        name: md.named(rng.integers(0, 256, spec.dims.sizes).astype("int32"), spec.dims)
        for name, spec in model.batch_spec(BATCH, LENGTH).items()
    }
    hand = by_hand(weights_of(state.params), batch, microbatches)
    return ours(model, state, batch, microbatches), hand


def times(run: Callable[[], Any]) -> Iterator[float]:
    """Yields the seconds of one step after another, without end."""
    while True:
        start = time.perf_counter()
        run()
        yield time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--remat", default="none")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    run, hand = problem(args.layers, args.microbatches, args.remat)
    first, second = run()[1], hand()[1]
    print(f"loss of the first step: ours {first:.6f}, by hand {second:.6f}")
    mine, theirs = times(run), times(hand)
    rows = []
    for number in range(WARM_UP + args.steps):
        pair = (next(mine), next(theirs)) if number % 2 else (next(theirs), next(mine))[::-1]
        rows.append(pair)
    rows = rows[WARM_UP:]
    ratios = [a / b for a, b in rows]
    a, b = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
    low, high = np.quantile(ratios, [0.25, 0.75])
    print(
        f"ours {a:.0f} ms, by hand {b:.0f} ms: {statistics.median(ratios):.2f} × "
        f"(quartiles {low:.2f} to {high:.2f})"
    )


if __name__ == "__main__":
    main()
