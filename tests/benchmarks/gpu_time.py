"""Time of whole training steps on one GPU: ours, the same model in plain JAX, and as predicted.

Both programs run in this process and in turn; what counts is the median of the ratios of
neighbouring calls. The plain program is the hand-written one of `tests.benchmarks.baselines`, with
JAX's fused attention. The share of the peak is by the formula of Chowdhery et al. 2022, "PaLM",
appendix B: six flops for each parameter and token, and 12 for each layer, feature and pair of
positions. Predicted are the seconds of `explain`, by a calibration of this GPU and by the tables.

Run: python -m meshdsl.cli.main calibrate --out=gpu.json
     python -m tests.benchmarks.gpu_time --hardware=gpu.json --hardware=h100
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl import optim
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.hardware import hardware_of
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.jax.torus import arrange_devices
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.models import Model
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.transformer import transformer
from meshdsl.training.state import TrainState, create, spec_of
from meshdsl.training.step import make_train_step
from tests.benchmarks.baselines import decoder, gpt
from tests.benchmarks.gspmd_time import random_batch

MESH, LAYOUT = "data:1,model:1", "batch:data"
MIXED = md.Policy(params="float32", compute="bfloat16", output="float32")
OPTIMIZER = optim.AdamW(1e-3, weight_decay=0.1)
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A model, and the plain program that computes the same: a function of a mesh."""

    model: Model
    program: Callable[[jax.sharding.Mesh], tuple[Any, Any, Any]]

    def jitted(self) -> tuple[Any, tuple[Any, Any]]:
        """Returns our training step, and the specs of its state and batch."""
        model = self.model
        function = md.jit(make_train_step(model.loss, OPTIMIZER), MESH, LAYOUT, donate="state")
        state = spec_of(create(model.init, OPTIMIZER))
        return function, (state, model.batch_spec(model.batch_size, model.length))

    def initial(self) -> TrainState:
        """Returns our state to start from."""
        make = create(self.model.init, OPTIMIZER)
        return md.jit(lambda key: {"state": make(key)}, MESH, LAYOUT)(md.random.key(0))["state"]

    def theirs(self) -> tuple[Any, Any, Any]:
        """Returns the plain program, its state and its batch."""
        return self.program(arrange_devices(Mesh.parse(MESH), jax.devices()[:1]))


def gpt2(small: bool = False) -> Case:
    """Returns GPT-2 small (Radford et al. 2019), or one that a CPU can run."""
    sizes = (2, 64, 4, 96, 16) if small else (12, 768, 12, 50257, 1024)
    batch = 4 if small else 32
    layers, embed, heads, vocab, length = sizes
    policy, dtype = _types(small)
    config = TransformerConfig(
        *sizes, norm="layer", positions="learned", bias=True, remat="none", policy=policy
    )
    plain = gpt.Gpt(layers, embed, heads, vocab, length, batch)
    model = transformer("gpt2_small", config, batch, length)
    return Case(model, partial(gpt.program, c=plain, dtype=dtype))


def llama(small: bool = False) -> Case:
    """Returns the sizes of Llama 3.2 1B (2024), or some that a CPU can run."""
    sizes = (2, 64, 4, 96, 16) if small else (16, 2048, 32, 128256, 2048)
    batch, kv_heads, d_ff = (4, 2, 96) if small else (8, 8, 8192)
    layers, embed, heads, vocab, length = sizes
    policy, _ = _types(small)
    config = TransformerConfig(
        *sizes, kv_heads=kv_heads, d_ff=d_ff, mlp="swiglu", remat="none", policy=policy
    )
    plain = decoder.Decoder(
        layers, embed, heads, kv_heads, d_ff, vocab, batch, length, gated=True, remat=False
    )
    program = partial(decoder.program, c=plain, size="small" if small else "tpu", kernels=True)
    return Case(transformer("llama_1b", config, batch, length), program)


def _types(small: bool) -> tuple[md.Policy, Any]:
    return (md.Policy(), jnp.float32) if small else (MIXED, jnp.bfloat16)


CASES = {"gpt2_small": gpt2, "llama_1b": llama}


def our_calls(case: Case, steps: int) -> Iterator[float]:
    """Yields the seconds of a step, the mean of some in a row, without end."""
    function, (spec, batch_spec) = case.jitted()
    compiled = function.lower(spec, batch_spec).compile()
    state, batch = case.initial(), random_batch(batch_spec)
    shardings = compiled.executable.shardings[-len(batch) :]
    batch = {
        name: md.NamedArray(jax.device_put(batch[name].data, sharding), batch[name].dims)
        for name, sharding in zip(sorted(batch), shardings, strict=True)
    }
    while True:
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(jax.tree.leaves((state, metrics)))
        yield (time.perf_counter() - start) / steps


def their_calls(case: Case, steps: int) -> Iterator[float]:
    """Yields the same of the plain program."""
    function, like, batch_like = case.theirs()
    compiled = function.lower(like, batch_like).compile()
    rng = np.random.default_rng(0)

    def drawn(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if np.issubdtype(leaf.dtype, np.integer):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        one = rng.standard_normal(leaf.shape, np.float32) * 0.02
        return jax.device_put(one.astype(leaf.dtype), leaf.sharding)

    state = {
        "params": jax.tree.map(drawn, like["params"]),
        "optimizer": jax.tree.map(
            lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), like["optimizer"]
        ),
    }
    tokens = {
        name: jax.device_put(rng.integers(0, 64, leaf.shape).astype(leaf.dtype), leaf.sharding)
        for name, leaf in batch_like.items()
    }
    while True:
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, tokens)
        jax.block_until_ready((state, metrics))
        yield (time.perf_counter() - start) / steps


def flops(config: TransformerConfig, parameters: int, tokens: int, length: int) -> int:
    """Returns the flops of a step by PaLM's formula; tied embeddings count as the logits' table."""
    attention = 12 * config.layers * config.embed * length
    table = config.max_length * config.embed if config.positions == "learned" else 0
    return (6 * (parameters - table) + attention) * tokens


def show(name: str, case: Case, rounds: int, steps: int, hardware: list[str]) -> None:
    """Measures a case, and prints what was found."""
    function, specs = case.jitted()
    program = function.lower(*specs)
    model = case.model
    leaves = jax.tree.leaves(specs[0].params, is_leaf=lambda x: isinstance(x, md.Spec))
    parameters = sum(leaf.dims.volume for leaf in leaves)
    tokens = model.batch_size * model.length
    known = hardware_of(jax.devices()[0].device_kind)
    if known is not None:
        hardware = [*hardware, known.name]
    predicted = {kind: step_seconds(program, find_hardware(kind)) for kind in hardware}
    ours, theirs = our_calls(case, steps), their_calls(case, steps)
    found: list[tuple[float, float]] = []
    for number in range(WARM_UP + rounds):
        if number % 2:
            took, other = next(theirs), next(ours)
            found.append((other, took))
        else:
            found.append((next(ours), next(theirs)))
    found = found[WARM_UP:]
    mine, other = (statistics.median(column) for column in zip(*found, strict=True))
    ratios = sorted(a / b for a, b in found)
    print(
        f"{name}: {parameters / 1e6:.1f} M parameters, {model.batch_size} x {model.length} tokens\n"
        f"  ours {1e3 * mine:.2f} ms, {tokens / mine:,.0f} tokens/s; plain JAX {1e3 * other:.2f} "
        f"ms; ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
        flush=True,
    )
    if known is not None:
        work = flops(model.config, parameters, tokens, model.length)
        share = work / mine / known.flops[2]
        print(
            f"  {share:.1%} of the peak of {known.title}, plain {work / other / known.flops[2]:.1%}"
        )
    for kind, seconds in predicted.items():
        print(
            f"  predicted by {kind}: {1e3 * seconds:.2f} ms, {seconds / mine - 1:+.1%}", flush=True
        )


def main() -> None:
    """Prints the figures of each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", choices=[*CASES], help="leave out for all")
    parser.add_argument("--hardware", action="append", default=[], help="what predicts the time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="in a row, of one program")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU can run")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}", flush=True)
    for name in arguments.model or CASES:
        case = CASES[name](arguments.small)
        show(name, case, arguments.rounds, arguments.steps, arguments.hardware)


if __name__ == "__main__":
    main()
