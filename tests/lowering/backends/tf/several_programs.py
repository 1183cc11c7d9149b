"""One process of two that run programs on several meshes, of which one process has built others.

`python -m tests.lowering.backends.tf.several_programs` with TF_CONFIG set. Prints, as JSON, a sum
on a mesh of one device in each process, and those along an axis within each process.
"""

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import meshdsl as md
from meshdsl.lowering.backends.tf.hosts.executable import Executable
from meshdsl.lowering.backends.tf.runtime import process_index

jax.config.update("jax_num_cpu_devices", 2)

X = md.named(np.arange(8.0), ["a"])
Y = md.named(np.arange(32.0).reshape(8, 4), ["a", "b"])


def main():
    if process_index() == 0:  # it has traced what the other process has not
        for mesh in ("x:2", "x:4"):
            Executable(md.jit(lambda x: md.sum(md.shift(x, "a", 1), "a"), mesh, "a:x").lower(X))
    found = {}
    ends = md.jit(
        lambda x: {"sum": md.sum(x, "a"), "max": md.max(x * 1.0, "a")}, "x:2", "a:x", "tf"
    )
    found |= {name: float(np.asarray(value)) for name, value in ends(X).items()}
    rows = md.jit(lambda y: md.sum(y, "b"), "x:2,y:2", "b:y", "tf")
    found["rows"] = np.asarray(rows(Y)).tolist()
    found["again"] = float(np.asarray(ends(X)["sum"]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
