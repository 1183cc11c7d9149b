"""The loss of training with products in 8 bits, beside the one in bfloat16.

    python -m tests.benchmarks.precision_loss --steps=500 fp8 int8 int8,embedding:-

Every precision trains gpt_mini on the same batches of the standard library's sources, from the same
parameters, step by step in turn. The model computes in bfloat16 apart from these products. The
table has the mean loss of the last fifty steps, the loss on held-out text, and their ratios to
those without 8 bits. XLA multiplies numbers of 8 bits on the CPU too: it converts floats of 8 bits
to wider ones, which rounds nothing, and adds up in float32, or int8 in int32.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

import meshdsl as md
from meshdsl.models import load
from meshdsl.optim import AdamW, schedules
from meshdsl.training import Recipe
from meshdsl.training.data import Corpus, ordered_batches, shuffled_batches

BASE = ""
LAST = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("precision", nargs="+")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--model", default="gpt_mini")
    parser.add_argument("--out", type=Path, help="file for the losses of all steps")
    given = parser.parse_args()
    model = load(given.model, "policy.compute=bfloat16")
    splits = Corpus.read(None, model.config.vocab).split(model.length, batch_size=model.batch_size)
    dims = {
        name: spec.dims for name, spec in model.batch_spec(model.batch_size, model.length).items()
    }
    optimizer = AdamW(schedules.warmup_cosine(1e-3, given.steps // 10, given.steps))
    recipes = {
        name: Recipe(model.init, model.loss, optimizer, clip_norm=1.0, precision=name or None)
        for name in (BASE, *given.precision)
    }
    steps = {name: md.jit(r.train_step(), donate="state") for name, r in recipes.items()}
    states = {name: md.jit(r.create_state())(md.random.key(0)) for name, r in recipes.items()}
    losses: dict[str, list[float]] = {name: [] for name in recipes}
    batches = shuffled_batches(splits.train, model.batch_size, 0)
    for number, batch in enumerate(itertools.islice(batches, given.steps), 1):
        named = {key: md.named(np.asarray(value), dims[key]) for key, value in batch.items()}
        for name, step in steps.items():
            states[name], metrics = step(states[name], named)
            losses[name].append(float(metrics["loss"]))
        if number % 10 == 0:
            print(number, {k: round(np.mean(v[-10:]), 4) for k, v in losses.items()}, flush=True)
            if given.out:
                given.out.write_text(json.dumps(losses))
    held_out = {}
    for name, recipe in recipes.items():
        evaluate = md.jit(recipe.eval_step())
        values = [
            float(
                evaluate(states[name].params, {k: md.named(v, dims[k]) for k, v in b.items()})[
                    "loss"
                ]
            )
            for b in ordered_batches(splits.valid, model.batch_size, 20)
        ]
        held_out[name] = float(np.mean(values))
    for name in recipes:
        last, base = (float(np.mean(losses[n][-LAST:])) for n in (name, BASE))
        print(
            f"{name or 'bfloat16':<28} last {LAST} steps {last:.4f} ({last / base:.4f})  "
            f"held out {held_out[name]:.4f} ({held_out[name] / held_out[BASE]:.4f})"
        )


if __name__ == "__main__":
    main()
