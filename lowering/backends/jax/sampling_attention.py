"""Sampling of attention: the cycles of one block of scores in the fused kernel of TPUs.

The compiler gives kernels no estimate. But it writes their schedule: how many bundles of
instructions it has made of the kernel, for one block of scores. A TensorCore runs a bundle in a
cycle, if it does not wait for memory. A kernel is compiled for every side of a block and every
number of features; a device with two TensorCores runs two blocks at a time.

Run: python -m meshdsl.lowering.backends.jax.sampling_attention v5p
(writes the families of attention of layouts/tables/v5p.json)
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshdsl.layouts.costs import ATTENTION_BLOCKS, GRADIENT
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.jax.ahead import devices
from meshdsl.lowering.backends.jax.operations.attention_splash import block_sizes
from meshdsl.lowering.backends.jax.sampling import SMALLEST_SLICE, write_table

SIDES = (128, 256, 512)
FEATURES = (64, 128, 256)
CORES = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1}
_HEADS, _BLOCKS = 2, 3  # an odd number of blocks: a kernel takes no larger ones
_BUNDLES = re.compile(r"total scheduled bundles:\s*(\d+)")


def bundles(folder: Path) -> dict[str, int]:
    """Returns the bundles of the kernels in a folder of the compiler's schedules, by their names.

    Raises:
        ValueError: a schedule does not say how many bundles there are.
    """
    found = {}
    for path in folder.glob("*splash_mha_*schedule-analysis_final_bundles.txt"):
        match = _BUNDLES.search(path.read_text())
        if match is None:
            raise ValueError(f"{path}: there is no number of bundles in this schedule")
        (kernel,) = re.findall(r"splash_mha_([a-z]+)", path.name)
        found[kernel] = int(match.group(1))
    return found


def _compile(name: str, side: int, features: int) -> None:
    """Compiles attention and its gradients for a kind of TPU."""
    length = side * _BLOCKS
    device = devices(Topology.parse(SMALLEST_SLICE[name]))[0]
    sharding = NamedSharding(jax.sharding.Mesh(np.array([device]), ("x",)), P())
    one = jax.ShapeDtypeStruct((_HEADS, length, features), jnp.bfloat16, sharding=sharding)
    kernel = splash.make_splash_mha(
        mask=splash.MultiHeadMask([splash.CausalMask((length, length))] * _HEADS),
        block_sizes=block_sizes(length, length),
        head_shards=1,
        q_seq_shards=1,
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple:
        result, pullback = jax.vjp(kernel, q, k, v)
        return result, pullback(cotangent)

    with jax.enable_x64(False):
        jax.jit(run).lower(one, one, one, one).compile()


def main() -> None:
    """Writes the families of attention of a kind of TPU."""
    name = sys.argv[1]
    jax.config.update("jax_platforms", "cpu")
    families: dict[str, list[list[int]]] = {ATTENTION_BLOCKS: [], GRADIENT[ATTENTION_BLOCKS]: []}
    with tempfile.TemporaryDirectory() as folder:
        # The compiler reads these once, when it is first used.
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        for side, features in itertools.product(SIDES, FEATURES):
            _compile(name, side, features)
            known = bundles(Path(folder))
            for path in Path(folder).iterdir():
                path.unlink()
            forward, backward = known["fwd"], known["dq"] + known["dkv"]
            for family, count in zip(families, (forward, backward), strict=True):
                families[family].append([side, features, -(-count // CORES[name])])
            print(f"{side} x {side}, {features} features: {forward} and {backward} bundles")
    write_table(name, families)


if __name__ == "__main__":
    main()
