"""What tracing and lowering cost the host: processor time by leaves, mesh axes, globs and rules.

The program with many leaves is a training step of an MLP whose layers are not scanned: each of its
parameters has a path of its own, its gradient and its two moments of AdamW. Every other program is
a training step of a named model.

Run: python -m tests.benchmarks.lowering_time [--leaves=100,1000,10000]
"""

import argparse
import time
from collections.abc import Callable

import meshdsl as md
from meshdsl import models, optim
from meshdsl.layouts.layout import Layout, matches
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step

LEAVES = {
    "data parallel": "batch:data",
    "FSDP": "batch:data; params/hidden:data",
}
SIX_AXES = "slice@dcn:4,data:16,rows:4,context:8,model:8,expert:4"
SIX_LAYOUT = (
    "batch:slice+data+rows; length:context; memory_length:context; heads:model; d_ff:model; "
    "vocab:model+expert; params/embed:data+rows; optimizer/embed:slice+data+rows"
)
TURNED = "ab:slice+data; cd:rows+context; ef:model+expert"
TURNED_TO = "x:rows+context; y:model+expert; z:slice+data"
THREE_LAYOUT = "batch:data; heads:model; d_ff:model; vocab:model; params/embed:data"


def mlp(leaves: int) -> tuple[Callable, tuple]:
    """Returns a training step over so many separate parameters, and the specs of its arguments."""
    hidden, wide = md.dims(hidden=64, wide=64)
    optimizer = optim.AdamW(1e-3)

    def init(key):
        return {f"layer_{i}": md.zeros([hidden, wide]) for i in range(leaves)}

    def loss(params, batch):
        x = batch["x"]
        for number in range(0, leaves, 2):
            up, down = params[f"layer_{number}"], params[f"layer_{min(number + 1, leaves - 1)}"]
            x = x + md.einsum(md.relu(md.einsum(x, up, over="hidden")), down, over="wide")
        return md.mean(md.square(x))

    step = make_train_step(loss, optimizer)
    batch = {"x": md.spec([md.Dimension("batch", 64), hidden], "float32")}
    return step, (spec_of(create(init, optimizer)), batch)


def training_step(name: str, batch: int) -> tuple[Callable, tuple]:
    """Returns the training step of a named model, and the specs of its arguments."""
    model = models.load(name)
    optimizer = optim.AdamW(1e-3, weight_decay=0.1)
    step = make_train_step(model.loss, optimizer, clip_norm=1.0)
    return step, (spec_of(create(model.init, optimizer)), model.batch_spec(batch, model.length))


def renaming() -> tuple[Callable, tuple]:
    """Returns a function that renames three dims, and the spec of its argument."""
    dims = md.dims(ab=1 << 16, cd=1 << 16, ef=1 << 16)
    return lambda x: x.rename(ab="x", cd="y", ef="z"), (md.spec(dims, "float32"),)


def spent(function: Callable, *args: object) -> float:
    """Returns the processor time of a call, in seconds."""
    start = time.process_time()
    function(*args)
    return time.process_time() - start


def lowering(
    step: Callable, specs: tuple, mesh: str, layout: str, donate: str | tuple[str, ...] = "state"
) -> tuple[float, float]:
    """Returns the processor time of tracing alone, and of tracing and lowering."""
    jitted = md.jit(step, mesh=mesh, layout=layout, donate=donate)
    return spent(jitted.trace, *specs), spent(jitted.lower, *specs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--leaves", default="100,1000,10000")
    for leaves in map(int, parser.parse_args().leaves.split(",")):
        for name, layout in LEAVES.items():
            trace, both = lowering(*mlp(leaves), "data:8", layout)
            print(f"{leaves:6d} leaves, {name}: trace {trace:.2f} s, with lowering {both:.2f} s")
    for name, mesh, layout in (
        ("gpt3_175b", SIX_AXES, SIX_LAYOUT),
        ("gpt3_175b", "data:64,model:8", THREE_LAYOUT),
    ):
        trace, both = lowering(*training_step(name, 1024), mesh, layout)
        print(f"{name} on {mesh}: trace {trace:.2f} s, with lowering {both:.2f} s")
    _, both = lowering(*renaming(), SIX_AXES, f"{TURNED}; {TURNED_TO}", donate=())
    print(f"a rename that turns six axes: {both:.2f} s")
    glob, path = "/".join(["**"] * 14) + "/nowhere", "/".join("abcdefghijklmnop")
    print(f"a glob with 14 times **: {spent(matches, glob, path):.4f} s")
    rules = "; ".join(f"params/layer_{i}/w/embed:data" for i in range(20_000))
    print(f"20,000 rules: {spent(Layout.parse, rules):.2f} s")


if __name__ == "__main__":
    main()
