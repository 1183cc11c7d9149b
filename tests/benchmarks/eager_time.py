"""What one operation outside of a traced function costs, once it is known, against jax.numpy's.

Prints microseconds of processor time per call and their ratio, on one device and on a mesh of four:
medians of interleaved rounds.
Run: python -m tests.benchmarks.eager_time
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md

ROUNDS, CALLS = 25, 40


def microseconds(function):
    start = time.process_time()
    for _ in range(CALLS):
        found = function()
    jax.block_until_ready(found)
    return 1e6 * (time.process_time() - start) / CALLS


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
            "sin": (lambda a=array: md.sin(a), lambda d=data: jnp.sin(d)),
            "exp": (lambda a=array: md.exp(a), lambda d=data: jnp.exp(d)),
            "tanh": (lambda a=array: md.tanh(a), lambda d=data: jnp.tanh(d)),
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
            print(f"  {case:<8}  {mine:7.1f} µs, jax.numpy {other:7.1f} µs, {mine / other:.2f}")


if __name__ == "__main__":
    main()
