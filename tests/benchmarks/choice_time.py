"""Time of scoring multiple choices: contexts that are read once, and once for each continuation.

Both score the same texts with the same `LikelihoodScorer`, in this process and in turn: all
continuations of a context together, and in as many calls as a context has continuations, so that no
two of a call follow the same. What counts is the median of the ratios of neighbouring rounds.

Run: python -m tests.benchmarks.choice_time [--context=100] [--choice=20] [--choices=4]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np

import meshdsl as md
from meshdsl import models
from meshdsl.generation import LikelihoodScorer

SIZES = "layers=4,embed=256,heads=8,vocab=4096"


def main() -> None:
    """Prints the seconds of both, and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_args", default=SIZES, help="of gpt_mini")
    parser.add_argument("--context", type=int, default=100, help="tokens before the choices")
    parser.add_argument("--choice", type=int, default=20, help="tokens of each choice")
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    model = models.load("gpt_mini", given.model_args)
    length = given.context + given.choice
    scorer = LikelihoodScorer(model, length=length, batch_size=given.batch_size)
    scorer.load(md.jit(model.init)(md.random.key(0)))
    rng = np.random.default_rng(0)

    def drawn(size: int) -> list[int]:
        return rng.integers(0, model.config.vocab, size).tolist()

    parts: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(given.choices)]
    for _ in range(given.examples):
        context = drawn(given.context)
        for part in parts:
            part.append((context, drawn(given.choice)))

    def seconds(calls: list[list[tuple[list[int], list[int]]]]) -> tuple[float, list[float]]:
        start = time.perf_counter()
        totals = [each.total for call in calls for each in scorer.score(call)]
        return time.perf_counter() - start, totals

    together = [[text for part in parts for text in part]]
    ratios, times, difference = [], [], 0.0
    for number in range(1 + given.rounds):  # the first one compiles
        (mine, a), (other, b) = seconds(together), seconds(parts)
        if number:
            times.append((mine, other))
            ratios.append(mine / other)
        difference = max(difference, float(np.abs(np.subtract(a, b)).max()))
    shared, apart = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{jax.devices()[0].device_kind}: {given.examples} contexts of {given.context} tokens, "
        f"{given.choices} continuations of {given.choice} each: {shared:.2f} s together, "
        f"{apart:.2f} s apart, {statistics.median(ratios):.2f} x; totals differ by {difference:.1e}"
    )


if __name__ == "__main__":
    main()
