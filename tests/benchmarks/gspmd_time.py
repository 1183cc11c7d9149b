"""Time of whole training steps on eight virtual CPU devices, ours against GSPMD's.

The pairs of `tests.benchmarks.pairs` at their small sizes run as our program and as one of whole
tensors with the same layout (`backend="jax_auto"`), in this process and in turn; what counts is
the median of the ratios of neighbouring steps.

Run: python -m tests.benchmarks.gspmd_time [--pair=NAME ...] [--steps=20]
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.tensors.named_array import Spec
from tests.benchmarks.pairs import PAIRS, Pair, initial, jitted

WARM_UP = 2


def random_batch(specs: Mapping[str, Spec]) -> dict[str, md.NamedArray]:
    """Returns a batch: normal numbers, and whole numbers that every vocabulary has."""
    rng = np.random.default_rng(0)
    found = {}
    for name, spec in specs.items():
        sizes = spec.dims.sizes
        whole = np.issubdtype(spec.dtype, np.integer)
        drawn = rng.integers(0, 64, sizes) if whole else rng.standard_normal(sizes)
        found[name] = md.named(drawn.astype(spec.dtype), spec.dims)
    return found


def steps(pair: Pair, backend: str) -> Iterator[float]:
    """Yields the seconds of one step after another, without end."""
    function, (spec, batch_spec) = jitted(pair, "small", backend)
    compiled = function.lower(spec, batch_spec).compile()
    state, batch = initial(pair, "small", backend), random_batch(batch_spec)
    shardings = compiled.executable.shardings[-len(batch) :]
    batch = {  # where the program wants it, as a data loader would
        name: md.NamedArray(jax.device_put(batch[name].data, sharding), batch[name].dims)
        for name, sharding in zip(sorted(batch), shardings, strict=True)
    }
    while True:
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready(jax.tree.leaves((state, metrics)))
        yield time.perf_counter() - start


def measured(pair: Pair, count: int) -> list[tuple[float, float]]:
    """Returns the seconds of neighbouring steps, ours and GSPMD's."""
    ours, theirs = steps(pair, "jax"), steps(pair, "jax_auto")
    found: list[tuple[float, float]] = []
    for number in range(WARM_UP + count):
        if number % 2:
            theirs_took, ours_took = next(theirs), next(ours)
        else:
            ours_took, theirs_took = next(ours), next(theirs)
        found.append((ours_took, theirs_took))
    return found[WARM_UP:]


def show(pair: Pair, found: list[tuple[float, float]]) -> str:
    """Returns a row of the table."""
    ratios: Any = [ours / theirs for ours, theirs in found]
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
    low, high = np.quantile(ratios, [0.25, 0.75])
    return (
        f"{pair.name:23s} ours {ours:8.1f} ms   GSPMD {theirs:8.1f} ms   "
        f"ratio {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", action="append", choices=[*PAIRS], help="leave out for all")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    medians = []
    for name in arguments.pair or PAIRS:
        found = measured(PAIRS[name], arguments.steps)
        print(show(PAIRS[name], found), flush=True)
        medians.append(statistics.median(ours / theirs for ours, theirs in found))
    mean = math.exp(math.fsum(map(math.log, medians)) / len(medians))
    print(f"geometric mean of {len(medians)} ratios {mean:.3f}, the largest {max(medians):.3f}")


if __name__ == "__main__":
    main()
