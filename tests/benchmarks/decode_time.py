"""Time of a step of decoding: ours, and a loop over a static cache that is written by hand in JAX.

Both write the texts of a GPT-2 with the same weights, greedily, in this process and in turn; what
counts is the median of the ratios of neighbouring rounds. The plain loop calls a jitted step, whose
cache is donated, and reads each token while the next step runs, as a `Writer` does. It is here in
three forms: `unrolled` layers with a cache each, a `scan` over layers that returns their caches,
and a `loop` over layers that updates one cache in place. The fastest of them is what ours is
compared with. The tokens of all have to be the same in float32, and nearly so in bfloat16.

Run: python -m tests.benchmarks.decode_time [--small] [--processor] [--batch=1] [--batch=8]
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
from jax import lax

import meshdsl as md
from meshdsl.generation import Sampling, Writer
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.transformer import transformer

WARM_UP = 2
CHUNK = 128


@dataclass(frozen=True)
class Case:
    """A GPT-2, and the texts that it writes after prompts of random tokens.

    Attributes:
        prompt: the tokens of a prompt, a multiple of `CHUNK`.
        steps: the tokens that are timed in each round; two more begin and end it.
    """

    layers: int
    embed: int
    heads: int
    vocab: int
    prompt: int
    steps: int
    dtype: str

    @property
    def context(self) -> int:
        """The positions of the caches."""
        return self.prompt + self.steps + 2

    def prompts(self, batch: int) -> np.ndarray:
        """Returns prompts, s32[batch, prompt]."""
        rng = np.random.default_rng(0)
        return rng.integers(0, self.vocab, (batch, self.prompt), np.int32)

    @property
    def config(self) -> TransformerConfig:
        """Ours."""
        sizes = (self.layers, self.embed, self.heads, self.vocab, self.context)
        policy = md.Policy(params="float32", compute=self.dtype, output="float32")
        options = {"norm": "layer", "positions": "learned", "bias": True}
        return TransformerConfig(*sizes, **options, policy=policy)

    def params(self) -> Any:
        """Returns random parameters, larger than initial ones, so that texts differ."""
        params = md.jit(self.model.init)(md.random.key(0))
        return jax.tree.map(lambda x: x * 3.0 if x.ndim > 1 else x, params)

    @property
    def model(self) -> Any:
        """Our model."""
        return transformer("gpt2", self.config, 1, self.context)


SMALL = Case(4, 256, 8, 4096, prompt=256, steps=24, dtype="float32")
GPT2 = Case(12, 768, 12, 50257, prompt=896, steps=126, dtype="bfloat16")


# The plain loop.


def plain_weights(case: Case, params: Any) -> dict[str, Any]:
    """Returns our parameters as plain arrays, in the dtype that steps compute in."""
    blocks = params.blocks
    attention, mlp = blocks.attention, blocks.mlp
    names = ("query", "key", "value", "out", "query_bias", "key_bias", "value_bias", "out_bias")
    layers = {name: getattr(attention, name) for name in names}
    layers |= {name: getattr(mlp, name) for name in ("w_in", "bias_in", "w_out", "bias_out")}
    for name in ("attention_norm", "mlp_norm"):
        norm = getattr(blocks, name)
        layers |= {name: norm.scale, f"{name}_bias": norm.bias}
    tree = {
        "embedding": params.embedding,
        "positions": params.positions,
        "layers": layers,
        "norm": params.final_norm.scale,
        "norm_bias": params.final_norm.bias,
    }
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), case.dtype), tree, is_leaf=_is_tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, md.Tensor)


def normed(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns the layer norm, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * scale + bias).astype(x.dtype)


def attended(q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    """Returns attention of new positions to those of a cache: [batch, length, heads, kv]."""
    scores = jnp.einsum("bthk,bshk->bhts", q, keys, preferred_element_type=jnp.float32)
    own = start + jnp.arange(q.shape[1])
    seen = jnp.arange(keys.shape[1])[None] <= own[:, None]
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores).astype(q.dtype), values)


def layer(
    x: jax.Array, w: Any, start: jax.Array, write: Callable[[str, jax.Array], jax.Array]
) -> jax.Array:
    """Returns the stream after a layer; `write` puts values into a cache and returns all of it."""
    h = normed(x, w["attention_norm"], w["attention_norm_bias"])
    q, k, v = (
        jnp.einsum("bte,ehk->bthk", h, w[name]) + w[f"{name}_bias"]
        for name in ("query", "key", "value")
    )
    mixed = attended(q, write("keys", k), write("values", v), start)
    x = x + jnp.einsum("bthk,hke->bte", mixed, w["out"]) + w["out_bias"]
    h = normed(x, w["mlp_norm"], w["mlp_norm_bias"])
    return x + jax.nn.gelu(h @ w["w_in"] + w["bias_in"]) @ w["w_out"] + w["bias_out"]


def unrolled(weights: Any, x: jax.Array, cache: Any, start: jax.Array) -> tuple[jax.Array, Any]:
    """Runs layers one after the other; the cache is a list of theirs."""
    fresh = []
    for w, own in zip(weights["layers"], map(dict, cache), strict=True):

        def write(name: str, values: jax.Array, own: Any = own) -> jax.Array:
            own[name] = lax.dynamic_update_slice_in_dim(own[name], values, start, 1)
            return own[name]

        x = layer(x, w, start, write)
        fresh.append(own)
    return x, fresh


def scanned(weights: Any, x: jax.Array, cache: Any, start: jax.Array) -> tuple[jax.Array, Any]:
    """Scans layers; the cache has those of all layers, stacked."""

    def body(x: jax.Array, given: Any) -> tuple[jax.Array, Any]:
        w, own = given
        own = dict(own)

        def write(name: str, values: jax.Array) -> jax.Array:
            own[name] = lax.dynamic_update_slice_in_dim(own[name], values, start, 1)
            return own[name]

        return layer(x, w, start, write), own

    return lax.scan(body, x, (weights["layers"], cache))


def looped(weights: Any, x: jax.Array, cache: Any, start: jax.Array) -> tuple[jax.Array, Any]:
    """Loops over layers, and updates one stacked cache in place."""

    def body(number: jax.Array, carry: Any) -> Any:
        x, cache = carry
        cache = dict(cache)
        w = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, 0, False), weights["layers"])

        def write(name: str, values: jax.Array) -> jax.Array:
            zero = jnp.zeros_like(number)
            at = (number, zero, start, zero, zero)
            cache[name] = lax.dynamic_update_slice(cache[name], values[None], at)
            return lax.dynamic_index_in_dim(cache[name], number, 0, False)

        return layer(x, w, start, write), cache

    count = len(jax.tree.leaves(weights["layers"])[0])
    return lax.fori_loop(0, count, body, (x, cache))


FORMS = {"unrolled": unrolled, "scan": scanned, "loop": looped}


def plain_step(form: str, weights: Any, cache: Any, start: jax.Array, tokens: jax.Array) -> Any:
    """Returns the cache after tokens [batch, length], the next start, and the likeliest token."""
    place = start + jnp.arange(tokens.shape[1])
    x = weights["embedding"][tokens] + weights["positions"][place]
    x, cache = FORMS[form](weights, x, cache, start)
    x = normed(x[:, -1], weights["norm"], weights["norm_bias"])
    scores = jnp.einsum("be,ve->bv", x, weights["embedding"], preferred_element_type=jnp.float32)
    chosen = jnp.argmax(scores, -1).astype(jnp.int32)[:, None]
    return cache, start + tokens.shape[1], chosen


def plain_texts(case: Case, form: str, batch: int, weights: Any) -> Iterator[Iterator[Any]]:
    """Yields what yields the tokens of the texts, [batch, 1] each, again and again."""
    width = case.embed // case.heads
    shape = (batch, case.context, case.heads, width)
    step = jax.jit(partial(plain_step, form), donate_argnums=1)
    if form == "unrolled":
        layers = [jax.tree.map(lambda a, n=n: a[n], weights["layers"]) for n in range(case.layers)]
        weights = {**weights, "layers": layers}
    prompts = case.prompts(batch)

    def write() -> Iterator[np.ndarray]:
        if form == "unrolled":
            cache: Any = [
                {name: jnp.zeros(shape, case.dtype) for name in ("keys", "values")}
                for _ in range(case.layers)
            ]
        else:
            whole = (case.layers, *shape)
            cache = {name: jnp.zeros(whole, case.dtype) for name in ("keys", "values")}
        start, following = jnp.int32(0), None
        for first in range(0, case.prompt, CHUNK):
            piece = jnp.asarray(prompts[:, first : first + CHUNK])
            cache, start, following = step(weights, cache, start, piece)
        for _ in range(case.steps + 1):
            tokens = following
            cache, start, following = step(weights, cache, start, tokens)
            yield np.asarray(tokens)[:, 0]
        yield np.asarray(following)[:, 0]

    while True:
        yield write()


# Ours.


def our_texts(case: Case, batch: int, params: Any) -> Iterator[Iterator[Any]]:
    """Yields the same of a `Writer`."""
    writer = Writer(
        case.model,
        prompt_tokens=case.prompt,
        new_tokens=case.steps + 2,
        batch_size=batch,
        sampling=Sampling(temperature=0),
    )
    writer.load(params)
    prompts = case.prompts(batch).tolist()
    while True:
        yield writer.write(prompts)


# The measurement.


Clock = Callable[[], float]


def timed(case: Case, text: Iterator[Any], clock: Clock) -> tuple[float, np.ndarray]:
    """Returns the seconds of a step, and all tokens of the texts, [batch, tokens]."""
    tokens = [next(text)]  # the prompt is read, and a step has begun
    start = clock()
    for _ in range(case.steps):
        tokens.append(next(text))
    seconds = (clock() - start) / case.steps
    tokens.extend(text)  # so that no step is left that runs beside the other program
    return seconds, np.stack(tokens, 1)


def show(case: Case, batch: int, rounds: int, clock: Clock) -> None:
    """Measures a batch size, and prints what was found."""
    params = case.params()
    weights = plain_weights(case, params)
    programs = {form: plain_texts(case, form, batch, weights) for form in FORMS}
    programs["ours"] = our_texts(case, batch, params)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    texts: dict[str, np.ndarray] = {}
    for number in range(WARM_UP + rounds):
        names = list(programs) if number % 2 else list(reversed(programs))
        for name in names:
            took, texts[name] = timed(case, next(programs[name]), clock)
            seconds[name].append(took)
    middle = {name: statistics.median(each[WARM_UP:]) for name, each in seconds.items()}
    best = min(FORMS, key=middle.__getitem__)
    pairs = zip(seconds["ours"][WARM_UP:], seconds[best][WARM_UP:], strict=True)
    ratios = sorted(mine / other for mine, other in pairs)
    same = np.mean(texts["ours"] == texts[best])
    different = len(np.unique(texts["ours"])) / texts["ours"].size
    forms = ", ".join(f"{form} {1e3 * middle[form]:.3f}" for form in FORMS)
    print(
        f"batch {batch}: ours {1e3 * middle['ours']:.3f} ms, {batch / middle['ours']:,.0f} "
        f"tokens/s; plain {forms} ms; ratio to {best} {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}); {same:.1%} of the tokens are equal, "
        f"{different:.0%} differ from each other",
        flush=True,
    )


def main() -> None:
    """Prints the figures of each batch size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", action="append", type=int, help="leave out for 1 and 8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="sizes that a CPU can run")
    parser.add_argument(
        "--processor", action="store_true", help="processor time, for CPUs that others keep busy"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    case = SMALL if arguments.small else GPT2
    if arguments.dtype:
        case = Case(**{**case.__dict__, "dtype": arguments.dtype})
    clock = time.process_time if arguments.processor else time.perf_counter
    device = jax.devices()[0]
    print(
        f"{device.device_kind}, JAX {jax.__version__}; GPT-2 of {case.layers} layers, embed "
        f"{case.embed}, vocab {case.vocab:,}, {case.dtype}; cache of {case.context} positions, the "
        f"last {case.steps} are timed",
        flush=True,
    )
    for batch in arguments.batch or (1, 8):
        show(case, batch, arguments.rounds, clock)


if __name__ == "__main__":
    main()
