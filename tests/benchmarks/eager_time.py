"""What one operation outside of a traced function costs, once it is known, against jax.numpy's.

Prints microseconds per call, on one device and on a mesh of four: medians of interleaved rounds.
Run: python -m tests.benchmarks.eager_time
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md

ROUNDS, CALLS = 5, 200


def microseconds(function):
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.perf_counter() - start) / CALLS


def main():
    jax.config.update("jax_num_cpu_devices", 4)
    x = md.named(np.ones((8, 4), np.float32), ["batch", "embed"])
    for name, array in (("one device", x + 0), ("four devices", md.place(x, "x:4", "batch:x"))):
        data = array.data
        gradient = md.grad(lambda x: md.sum(md.sin(x)))
        cases = {
            "x + 1": (lambda a=array: a + 1, lambda d=data: d + 1),
            "x * x": (lambda a=array: a * a, lambda d=data: d * d),
            "softmax": (lambda a=array: md.softmax(a, "embed"), lambda d=data: jax.nn.softmax(d)),
            "sum": (lambda a=array: a.sum("embed"), lambda d=data: jnp.sum(d, 1)),
            "gradient": (
                lambda a=array, g=gradient: g(a),
                lambda d=data: jax.grad(lambda x: jnp.sum(jnp.sin(x)))(d),
            ),
        }
        print(name)
        for case, (ours, theirs) in cases.items():
            ours(), theirs()
            rounds = [(microseconds(ours), microseconds(theirs)) for _ in range(ROUNDS)]
            mine, other = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"  {case:<8}  {mine:7.1f} µs, jax.numpy {other:7.1f} µs")


if __name__ == "__main__":
    main()
