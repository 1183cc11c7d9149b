"""What a call of a compiled function costs the host, against `jax.jit` of the same function.

Prints ratios of processor time, of 40 calls in a row: one parameter and 200, on one device and on a
mesh of eight; with arrays where they belong, and with arrays of one device or of the host; with a
plain number beside them, and of two shapes in turn. Rounds of ours and theirs are interleaved; the
ratio is of their medians.
Run: python -m tests.benchmarks.call_time
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md

ROUNDS, CALLS = 15, 40
WIDTH = 8


def microseconds(function, argument):
    start = time.process_time()
    for _ in range(CALLS):
        found = function(argument)
    jax.block_until_ready(found)
    return 1e6 * (time.process_time() - start) / CALLS


def double(tree):
    return {name: leaf + leaf for name, leaf in tree.items()}


def cost(count, mesh, layout, make):
    """Returns the cost of our call and of `jax.jit`'s, in microseconds of processor time."""
    mine = {f"p{i}": md.named(make(), ["row"]) for i in range(count)}
    ours, jaxs = md.jit(double, mesh=mesh or None, layout=layout), jax.jit(double)
    if make is placed:
        mine = ours(mine)
    elif mesh:  # `jax.jit` has to move them as well
        places = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
        jaxs = jax.jit(double, in_shardings=places)
    theirs = {name: array.data for name, array in mine.items()}
    for _ in range(3):
        ours(mine), jaxs(theirs)
    rounds = [(microseconds(ours, mine), microseconds(jaxs, theirs)) for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def varied(count, scale):
    """Returns the costs of calls with a plain number, or else of two shapes in turn."""
    trees = [
        {f"p{i}": md.named(jnp.ones(size, jnp.float32), ["row"]) for i in range(count)}
        for size in ((WIDTH,) if scale else (WIDTH, 2 * WIDTH))
    ]
    rest = (0.5,) if scale else ()

    def scaled(tree, by=None):
        return {name: leaf * (2.0 if by is None else by) for name, leaf in tree.items()}

    ours, jaxs = md.jit(scaled), jax.jit(scaled)
    theirs = [{name: array.data for name, array in tree.items()} for tree in trees]
    turns = [
        (lambda _: [ours(tree, *rest) for tree in trees][-1]),
        (lambda _: [jaxs(tree, *rest) for tree in theirs][-1]),
    ]
    for _ in range(6):
        [turn(None) for turn in turns]
    rounds = [[microseconds(turn, None) for turn in turns] for _ in range(ROUNDS)]
    return [statistics.median(column) / len(trees) for column in zip(*rounds, strict=True)]


def placed():
    return np.ones(WIDTH, np.float32)


ARRAYS = {
    "in place": placed,
    "one device": lambda: jnp.ones(WIDTH, jnp.float32),
    "host": lambda: np.ones(WIDTH, np.float32),
}


def show(where, what, count, ours, jaxs):
    print(f"{where:<11} {what:<11} {count:10} {ours:8.1f} {jaxs:8.1f} {ours / jaxs:5.2f}")


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    print("called on   arrays      parameters  ours    jax.jit  ratio (µs of processor time)")
    for mesh, layout in (("", ""), ("data:8", "row:data")):
        for name, make in ARRAYS.items():
            for count in (1, 200):
                show(mesh or "one device", name, count, *cost(count, mesh, layout, make))
    for what in ("number", "two shapes"):
        for count in (1, 20, 200):
            show("one device", what, count, *varied(count, what == "number"))


if __name__ == "__main__":
    main()
