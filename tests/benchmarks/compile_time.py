"""What waits before the first step: tracing, lowering and compiling gpt_mini's full training step.

Prints the time to trace and lower, and what 48 layers cost against 4 (layers are scanned).
Run: python -m tests.benchmarks.compile_time
"""

import statistics
import time

import jax

import meshdsl as md
from meshdsl import models, optim
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step

MESH = "data:2,model:4"
LAYOUT = "batch:data; heads:model; d_ff:model; vocab:model"
ROUNDS = 3


def job(layers: int):
    """Returns the jitted training step of gpt_mini and the specs of its arguments."""
    model = models.load("gpt_mini", f"layers={layers}")
    optimizer = optim.AdamW(1e-3, weight_decay=0.1)
    step = make_train_step(model.loss, optimizer, clip_norm=1.0)
    state = spec_of(create(model.init, optimizer))
    batch = model.batch_spec(model.batch_size, model.length)
    return md.jit(step, mesh=MESH, layout=LAYOUT, donate="state"), (state, batch)


def timed(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    jax.devices()
    seconds = {}
    for _ in range(ROUNDS):
        for layers in (4, 48):
            step, specs = job(layers)
            lowering, program = timed(step.lower, *specs)
            compiling, _ = timed(program.compile)
            seconds.setdefault(layers, []).append((lowering, compiling))
    for layers, rows in seconds.items():
        lowering, compiling = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{layers:3d} layers: trace and lower {lowering:.3f} s, compile {compiling:.2f} s")
    ratios = [
        sum(deep) / sum(shallow) for shallow, deep in zip(seconds[4], seconds[48], strict=True)
    ]
    print(f"48 layers cost {statistics.median(ratios):.3f} x what 4 cost")


if __name__ == "__main__":
    main()
