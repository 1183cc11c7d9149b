"""Sampling: the cycles that the TPU compiler gives operations of many sizes, as a table of costs.

Many operations stand in one program, each with inputs and a scope of its own, and the compiler's
estimate of each is read from what it writes after code generation. No TPU is needed.

* Products: [rows, inner] x [inner, columns] in bfloat16, for all sizes of `PRODUCT_SIZES` whose
  operands fit. Larger ones run as fast as the largest.
* Elementwise work (`x * y + z`), in float32, by bytes.

`sampling_attention` beside it does the same for fused kernels.

Run: python -m meshdsl.lowering.backends.jax.sampling v5p    (writes layouts/tables/v5p.json)
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshdsl.layouts import costs
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.hlo.text import Module
from meshdsl.lowering.backends.jax.ahead import devices

PRODUCT_SIZES = (64, 128, 256, 512, 1024, 2048, 8192)
# What is smaller is padded to the first.
MOVED_BYTES = (2**17, *(2**power for power in range(18, 31, 2)))
SMALLEST_SLICE = {"v4": "v4:2x2x1", "v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}
_ROOM = 0.6  # of the memory, for the operands of one program
_IN_ONE_PROGRAM = 60
_SCOPE = "sample{}_"


@dataclass(frozen=True)
class Sample:
    """One operation: what it is in the table, and what is compiled.

    Attributes:
        sizes: rows, inner and columns of a product; the bytes that other work moves.
        shapes: those of the operands.
    """

    family: str
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    function: Callable[..., jax.Array]

    @property
    def bytes(self) -> int:
        """The bytes of the operands, and about those of the result."""
        return (
            2 * sum(int(np.prod(shape)) for shape in self.shapes) * jnp.dtype(self.dtype).itemsize
        )


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("ab,bc->ac", x, y, preferred_element_type=jnp.float32).astype(x.dtype)


def _elementwise(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    return x * y + z


def samples() -> Iterator[Sample]:
    """Yields all operations."""
    for rows, inner, columns in itertools.product(PRODUCT_SIZES, repeat=3):
        shapes = (rows, inner), (inner, columns)
        yield Sample(costs.PRODUCTS, (rows, inner, columns), shapes, "bfloat16", _product)
    for moved in MOVED_BYTES:
        # Three operands and a result, of 4 bytes an element.
        shape = (moved // 16 // 1024, 1024)
        yield Sample(costs.ELEMENTWISE, (moved,), (shape,) * 3, "float32", _elementwise)


def sampled(name: str) -> dict[Sample, int]:
    """Returns the cycles of all operations on a kind of TPU: `sampled("v5p")`.

    Raises:
        ValueError: the compiler gives this kind of TPU no cycles, or is not installed.
    """
    if name not in SMALLEST_SLICE:
        raise ValueError(
            f"there are no cycles of {name!r}; choose one of {', '.join(SMALLEST_SLICE)}"
        )
    topology = Topology.parse(SMALLEST_SLICE[name])
    device = devices(topology)[0]
    room = _ROOM * hardware(name).memory_bytes
    cycles: dict[Sample, int] = {}
    batch: list[Sample] = []
    for sample in samples():
        if sample.bytes > room:
            continue
        if len(batch) == _IN_ONE_PROGRAM or sum(s.bytes for s in batch) + sample.bytes > room:
            cycles |= _compiled(batch, device)
            batch = []
        batch.append(sample)
    return cycles | _compiled(batch, device)


def _compiled(batch: Sequence[Sample], device: jax.Device) -> dict[Sample, int]:
    """Returns the cycles of the operations of one program."""
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    sharding = NamedSharding(mesh, P())
    arguments = [
        [jax.ShapeDtypeStruct(shape, sample.dtype, sharding=sharding) for shape in sample.shapes]
        for sample in batch
    ]

    def run(groups: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        results = []
        for number, (sample, group) in enumerate(zip(batch, groups, strict=True)):
            with jax.named_scope(_SCOPE.format(number)):
                results.append(sample.function(*group))
        return results

    with tempfile.TemporaryDirectory() as folder:
        jax.jit(run).lower(arguments).compile(compiler_options={"xla_dump_to": folder})
        (file,) = Path(folder).glob("*.after_codegen.txt")
        module = Module.parse(file.read_text())
    totals = dict.fromkeys(range(len(batch)), 0)
    for line in module.computations[module.entry].values():
        match = re.search(_SCOPE.format(r"(\d+)"), line.scope)
        if match and line.cycles is not None:
            totals[int(match.group(1))] += line.cycles
    return {batch[number]: count for number, count in totals.items() if count}


def main() -> None:
    """Writes the table of a kind of TPU."""
    name = sys.argv[1]
    jax.config.update("jax_platforms", "cpu")
    start = time.process_time()
    cycles = sampled(name)
    table: dict[str, list[list[int]]] = {}
    for sample, count in cycles.items():
        table.setdefault(sample.family, []).append([*sample.sizes, count])
    write_table(name, table)
    seconds = time.process_time() - start
    print(f"{costs.path_of(name)}: {seconds:.0f} s of processor time")


def write_table(name: str, families: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Writes some families of operations into the table of a kind of TPU; the others stay."""
    path = costs.path_of(name)
    known = json.loads(path.read_text())["families"] if path.is_file() else {}
    table = {**known, **families}
    count = sum(map(len, table.values()))
    origin = f"estimated_cycles of libtpu {version('libtpu')}, {count} operations"
    path.write_text(costs.to_json(name, origin, table))


if __name__ == "__main__":
    main()
