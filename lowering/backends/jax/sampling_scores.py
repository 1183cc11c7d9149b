"""Sampling of scores: the cycles of attention in blocks of scores, without a fused kernel.

Attention and its gradients are compiled with as many batches and heads as make several blocks, and
their cycles are divided by the number of blocks. The longest side is that of longer matrices: there
the blocks of a row are added up, with their running maximum. The scores have a bias: without any
mask, a kernel would have fitted.

Run: python -m meshdsl.lowering.backends.jax.sampling_scores v5p
(writes the families of scores of layouts/tables/v5p.json)
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshdsl.layouts.costs import GRADIENT, SCORES
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.attention_sizes import BLOCK, LONGEST, AttentionSizes
from meshdsl.lowering.backends.common.attention import Attention
from meshdsl.lowering.backends.hlo.schedule import schedule
from meshdsl.lowering.backends.jax import namespace as xp
from meshdsl.lowering.backends.jax.ahead import devices
from meshdsl.lowering.backends.jax.operations.attention import backward, forward
from meshdsl.lowering.backends.jax.sampling import SMALLEST_SLICE, write_table
from meshdsl.lowering.parameters import AttentionGradient
from meshdsl.tensors.dims import Dimension, Shape

SIDES = (64, 128, 256, 512)
FEATURES = (64, 128)
_PARTS = 4  # of the batches and heads
_BLOCKS = 4  # of a row, for the longest side


def sizes_of(side: int, features: int) -> AttentionSizes:
    """Returns the sizes of an attention whose blocks have a side."""
    length = side * _BLOCKS if side == LONGEST else side
    lead, rows, columns, inner, values = map(
        Dimension,
        ("lead", "rows", "columns", "features", "values"),
        (_PARTS * BLOCK // side**2, length, length, features, features),
    )
    return AttentionSizes(Shape([lead]), rows, columns, inner, Shape([values]), shared=1)


def cycles(name: str, side: int, features: int) -> tuple[int, int]:
    """Returns the cycles of a block of a kind of TPU, and of the gradients of a block."""
    sizes = sizes_of(side, features)
    lead = sizes.lead.volume
    of_rows, of_sums = ((lead, sizes.rows.size, size) for size in (features, 1))
    params: AttentionGradient = {
        "length": "rows",
        "memory": "columns",
        "features": "features",
        "scale": 1.0,
        "soft_cap": None,
        "causal": False,
        "window": None,
        "offset": 0,
        "given": ("bias",),
        "bias_gradient": False,
    }
    names = {"q": "aRE", "k": "aCE", "v": "aCF", "s": "aRC", "o": "aRF"}

    def attention(q: Any, k: Any, v: Any, bias: Any) -> Attention:
        return Attention(xp, params, sizes, names, q, k, v, {"bias": bias})

    def of_result(*operands: Any) -> Sequence[jax.Array]:
        return forward(attention(*operands))

    def of_gradients(*operands: Any) -> Sequence[jax.Array]:
        return backward(attention(*operands[:4]), *operands[4:])

    blocks = sizes.scores // side**2
    operands = [(of_rows, jnp.bfloat16)] * 3 + [((1, 1, sizes.columns.size), jnp.float32)]
    result, total = (of_rows, jnp.float32), (of_sums, jnp.float32)
    return (
        _compiled(name, of_result, operands) // blocks,
        _compiled(name, of_gradients, [*operands, result, total, result]) // blocks,
    )


def _compiled(name: str, function: Callable, given: Sequence[tuple[tuple[int, ...], Any]]) -> int:
    """Returns the cycles of a function of arrays, given their shapes and dtypes."""
    device = devices(Topology.parse(SMALLEST_SLICE[name]))[0]
    sharding = NamedSharding(jax.sharding.Mesh(np.array([device]), ("x",)), P())
    arguments = [jax.ShapeDtypeStruct(*one, sharding=sharding) for one in given]
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(False):
        jax.jit(function).lower(*arguments).compile(compiler_options={"xla_dump_to": folder})
        (file,) = Path(folder).glob("*.after_codegen.txt")
        kind = hardware(name)
        return round(schedule(file.read_text(), Mesh.parse("x:1"), kind).seconds * kind.clock)


def main() -> None:
    """Writes the families of scores of a kind of TPU."""
    name = sys.argv[1]
    jax.config.update("jax_platforms", "cpu")
    families: dict[str, list[list[int]]] = {SCORES: [], GRADIENT[SCORES]: []}
    for side, features in itertools.product(SIDES, FEATURES):
        counts = cycles(name, side, features)
        for family, count in zip(families, counts, strict=True):
            families[family].append([side, features, count])
        shown = " and ".join(map(str, counts))
        print(f"{side} x {side}, {features} features: {shown} cycles", flush=True)
    write_table(name, families)


if __name__ == "__main__":
    main()
