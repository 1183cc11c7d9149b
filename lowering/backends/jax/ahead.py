"""Ahead: compiles a program for a machine that is not there, with the machine's own compiler.

libtpu, the compiler of TPUs, needs no TPU: JAX describes the devices of a slice, and the program is
compiled for them as for those of a job, fused kernels, places on the torus, flags and all. Nothing
is allocated or run, and nothing is asked of the network.
"""

from __future__ import annotations

import collections
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends.compiler_flags import Flag
from meshdsl.lowering.backends.hlo_wire import sent
from meshdsl.lowering.backends.jax.executable import Executable
from meshdsl.lowering.backends.jax.torus import placed
from meshdsl.lowering.compiled import Compiled
from meshdsl.lowering.program import SpmdProgram

# Several processes may compile at a time.
_NO_TPU = {
    "TPU_ACCELERATOR_TYPE": "v5e-256",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_USED = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")


def require_compiler() -> None:
    """Raises ValueError if the compiler of TPUs is not installed."""
    if find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs their compiler, libtpu, which is not installed: "
            "pip install 'meshdsl[tpu]'. The plan alone needs nothing: meshdsl explain"
        )


def devices(topology: Topology) -> Sequence[Any]:
    """Returns the devices of TPU slices that are not there.

    Raises:
        ValueError: libtpu is not installed, or it knows no such slice.
    """
    require_compiler()
    options: dict[str, Any] = {}
    if topology.name == "v4":  # both cores of a chip work as one
        options["chip_config_name"] = "megacore"
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    shape = f"{topology.name}:{'x'.join(map(str, topology.sizes))}"
    with _without_network():
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=shape, **options)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"libtpu knows no topology {shape}: {_first_line(error)}") from error
    return found.devices


@contextmanager
def _without_network() -> Iterator[None]:
    """Keeps libtpu, which is started where it is first asked, from looking for a TPU."""
    added = {name: value for name, value in _NO_TPU.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def compile_ahead(program: SpmdProgram, topology: Topology, flags: Mapping[str, Flag]) -> Compiled:
    """Compiles a program for a machine of TPUs.

        compile_ahead(f.lower(x), Topology.parse("v5p:8x8x8"), RECOMMENDED["v5p"])

    Args:
        flags: the compiler's; see `backends.compiler_flags`.

    Raises:
        ValueError: the mesh does not cover the machine, libtpu is not installed, or a flag is not
            known to it.
    """
    problems = topology.problems(program.mesh)
    if problems:
        raise ValueError("\n".join(problems))
    mesh = placed(program.mesh, devices(topology))
    start = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        # jaxlib cannot read all programs that libtpu makes; libtpu writes what it made.
        options = {**flags, "xla_dump_to": folder}
        given_up = program.donated
        executable, room = None, (0, 0)
        try:
            executable = Executable(program, given_up, mesh, compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            room = _too_large(error)
        took = time.perf_counter() - start[0], time.process_time() - start[1]
        if executable is None:
            reason = "libtpu leaves no program that does not fit"
            return Compiled(*room, False, None, *took, unread=reason)
        found, reason = _sent(Path(folder), program.mesh.size)
    peak = executable.memory_analysis().peak_memory_in_bytes
    return Compiled(peak, None, True, found, *took, unread=reason)


def _sent(folder: Path, count: int) -> tuple[Mapping[str, float] | None, str]:
    """Returns what a device sends by the optimised program, by kind, or why that is not known."""
    files = list(folder.glob("*.after_optimizations.txt"))
    if len(files) != 1:
        return None, f"libtpu wrote {len(files)} programs, not one"
    found: dict[str, float] = collections.defaultdict(float)
    try:
        for one in sent(files[0].read_text(), count):
            found[one.kind] += one.wire_bytes * one.count
    except ValueError as error:
        return None, str(error)
    return found, ""


def _too_large(error: Exception) -> tuple[int, int]:
    """Returns what would be needed and what there is, of a program that does not fit.

    Raises:
        ValueError: the compiler refused it for another reason.
    """
    text = str(error)
    match = _USED.search(text)
    if "RESOURCE_EXHAUSTED" in text and match:
        needed, unit, room, of_room = match.groups()
        return int(float(needed) * _UNITS[unit]), int(float(room) * _UNITS[of_room])
    raise ValueError(f"libtpu refuses the program: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
