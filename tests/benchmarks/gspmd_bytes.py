"""Bytes on the wire of whole training steps, ours against GSPMD's, by the real TPU compiler.

Each pair of `tests.benchmarks.pairs` is compiled for 64 TPU v5p chips, as our program and as one of
global tensors with the same layout (`backend="jax_auto"`), and what a device sends is counted in
the optimised HLO. No TPU is needed, only libtpu (`pip install -e '.[tpu]'`). Neither program uses
fused attention kernels, which GSPMD cannot split, nor blocks of scores: both compute all scores of
a layer at once, as programs written by hand for GSPMD do. Seconds are of processor time, of all
threads, and of lowering and compiling; up to a minute for each program.

Run: python -m tests.benchmarks.gspmd_bytes [--pair=NAME ...] [--backend=jax] [--keep]
         [--dump=FOLDER]
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering import attention_sizes, backends
from meshdsl.lowering.backends.hlo.wire import wire_bytes
from tests.benchmarks.pairs import PAIRS, TOPOLOGY, Pair, jitted

BACKENDS = ("jax", "jax_auto")
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program: bytes are of one device and step."""

    wire_bytes: float
    peak_bytes: int
    seconds: float
    text: str
    planned_wire_bytes: float
    planned_peak_bytes: int


def topology_mesh(mesh: Mesh, topology: str = TOPOLOGY) -> jax.sharding.Mesh:
    """Returns the devices of a mesh on machines that are not there."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sizes = [size for _, size in mesh.axes]
    kinds = (AxisType.Auto,) * len(sizes)
    numbered = np.array(devices[: mesh.size]).reshape(sizes)
    return jax.sharding.Mesh(numbered, mesh.names, axis_types=kinds)


def compiled(pair: Pair, backend: str, folder: Path, keep: bool = False) -> Compiled:
    """Compiles a pair for `TOPOLOGY`; libtpu leaves the optimised HLO in `folder`."""
    function, arguments = jitted(pair, "tpu", backend, keep)
    start = time.process_time()
    program = function.lower(*arguments)
    devices = topology_mesh(program.mesh)
    given_up = program.donated
    executable = backends.load(backend).Executable(program, given_up, devices, platform="cpu")
    seconds = time.process_time() - start
    (file,) = folder.glob("*hlo.txt")
    text = file.read_text()
    file.unlink()
    return Compiled(
        wire_bytes(text, program.mesh.size),
        executable.memory_analysis().peak_memory_in_bytes,
        seconds,
        text,
        program.wire_bytes,
        program.peak_bytes,
    )


def show(pair: Pair, found: Mapping[str, Compiled]) -> str:
    """Returns a row of the table."""
    cells = [f"{pair.name:23s}"]
    cells += [f"{one.wire_bytes / MIB:10,.0f}" for one in found.values()]
    if len(found) == 2:
        cells.append(f"{ratio(found):6.3f}")
    cells += [f"{one.seconds:8.1f}" for one in found.values()]
    cells += [f"{one.peak_bytes / GIB:8.2f}" for one in found.values()]
    return " ".join(cells)


def ratio(found: Mapping[str, Compiled]) -> float:
    """Returns our bytes over GSPMD's; both may be none."""
    ours, theirs = (found[name].wire_bytes for name in BACKENDS)
    return 1.0 if ours == theirs else ours / theirs if theirs else math.inf


def title(names: Sequence[str]) -> str:
    """Returns the heads of the columns."""
    short = {"jax": "ours", "jax_auto": "GSPMD"}
    words = [short[name] for name in names]
    wire = "".join(f" {word:>10s}" for word in words) + (
        f" {'ratio':>6s}" if len(words) > 1 else ""
    )
    rest = "".join(f" {word:>8s}" for word in words)
    over = f"{'':23s}{'MiB on the wire':>{len(wire)}s}{'seconds':>{len(rest)}s}"
    return f"{over}{'peak GiB':>{len(rest)}s}\n{'':23s}{wire}{rest}{rest}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", action="append", choices=[*PAIRS], help="leave out for all")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="leave out for both")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what has been moved: --remat=keep_collectives, --memory=95GiB",
    )
    parser.add_argument("--dump", type=Path, help="a folder for the optimised HLO")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _set_up(folder)
        _table(arguments, Path(folder))


def _set_up(folder: str) -> None:
    # The machine has no TPU: JAX must not look for one, and libtpu must not ask the network for
    # one. Several processes may compile at a time. libtpu writes the program itself, since jaxlib
    # cannot read all of those that it makes (`async-update` with several operands).
    jax.config.update("jax_platforms", "cpu")
    attention_sizes.DIRECT = 2**62  # scores that are computed at once
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-256")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    flags = {"to": folder, "hlo_text": "true", "llo_text": "false", "category_filter": "program"}
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())


def _table(arguments: argparse.Namespace, folder: Path) -> None:
    names = [name for name in BACKENDS if name in (arguments.backend or BACKENDS)]
    print(title(names), flush=True)
    ratios = []
    for name in arguments.pair or PAIRS:
        pair, keep = PAIRS[name], arguments.keep
        found = {backend: compiled(pair, backend, folder, keep) for backend in names}
        print(show(pair, found), flush=True)
        if len(names) == 2:
            ratios.append(ratio(found))
        for backend, one in found.items():
            if arguments.dump is not None:
                arguments.dump.mkdir(parents=True, exist_ok=True)
                (arguments.dump / f"{name}.{backend}.hlo").write_text(one.text)
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean of {len(ratios)} ratios {mean:.3f}, the largest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
