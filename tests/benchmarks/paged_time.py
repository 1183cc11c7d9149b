"""Time and memory of continuous batching: rows with caches of their own, and pages that they share.

Both write the same random prompts of a GPT-2 with the same weights, greedily, in this process and
in turn; what counts is the median of the ratios of neighbouring rounds, and the bytes of the
caches. The tokens have to be the same in float32.

Run: python -m tests.benchmarks.paged_time [--small] [--processor] [--rows=8] [--share=0.5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from meshdsl.generation import RowWriter, Sampling
from meshdsl.lowering.costs.units import show_bytes
from tests.benchmarks.decode_time import GPT2, SMALL, Case

WARM_UP = 2


def begun(case: Case, rows: int, cache_tokens: int | None, prompt: int) -> RowWriter:
    """Returns a writer that has a text of `prompt` tokens in each row."""
    writer = RowWriter(case.model, context=case.context, rows=rows, cache_tokens=cache_tokens)
    writer.load(case.params())
    for row, tokens in enumerate(case.prompts(rows)):
        *_, read = writer.read(tokens[:prompt].tolist(), Sampling(temperature=0))
        writer.join(read, row)
    return writer


def timed(writer: RowWriter, steps: int, clock: Callable[[], float]) -> tuple[float, np.ndarray]:
    """Returns the seconds of a step, and the tokens of all texts."""
    tokens, before = [], writer.step()
    start = clock()
    for _ in range(steps):
        after = writer.step()
        tokens.append(np.asarray(before)[:, 0])
        before = after
    return (clock() - start) / steps, np.stack(tokens, 1)


def main() -> None:
    """Prints the figures of a number of rows, and of the share of their slots that is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5, help="of the slots of caches apart")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--processor", action="store_true", help="processor time")
    given = parser.parse_args()
    case, clock = SMALL if given.small else GPT2, time.perf_counter
    if given.processor:
        clock = time.process_time
    shared = int(given.rows * case.context * given.share)
    steps = 8
    # All rounds together have room beside the prompts.
    prompt = shared // given.rows - steps * (WARM_UP + given.rounds + 1) - 16
    writers = [begun(case, given.rows, tokens, prompt) for tokens in (None, shared)]
    seconds: list[list[float]] = [[], []]
    for number in range(WARM_UP + given.rounds):
        texts = {}
        for at in (0, 1) if number % 2 else (1, 0):
            took, texts[at] = timed(writers[at], steps, clock)
            seconds[at].append(took)
        same = np.mean(texts[0] == texts[1])
    ratios = sorted(
        paged / own for own, paged in zip(*(each[WARM_UP:] for each in seconds), strict=True)
    )
    own, paged = (1e3 * statistics.median(each[WARM_UP:]) for each in seconds)
    own_bytes, paged_bytes = (show_bytes(writer.cache_bytes) for writer in writers)
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; GPT-2 of {case.layers} layers, "
        f"embed {case.embed}, {case.dtype}; {given.rows} rows of {case.context} positions: "
        f"{own:.2f} ms, {own_bytes}; {shared:,} slots in pages: {paged:.2f} ms, {paged_bytes}; "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); "
        f"{same:.1%} of the tokens are equal"
    )


if __name__ == "__main__":
    main()
