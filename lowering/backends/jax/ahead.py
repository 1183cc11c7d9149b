"""Ahead: compiles a program for TPUs that are not there, with the compiler of TPUs.

libtpu, that compiler, needs no TPU: JAX describes the devices of a slice. The program is compiled
for them as for those of a job, with the same fused kernels, order of devices and flags. Nothing is
allocated or run, and the network is not used.
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
from meshdsl.lowering.backends.jax.torus import arrange_devices
from meshdsl.lowering.compiled import Compiled
from meshdsl.lowering.program import SpmdProgram

# The last entry lets several processes compile at a time.
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
    """Returns the devices of TPU slices, which need not exist.

    Raises:
        ValueError: libtpu is not installed, or does not know this kind of slice.
    """
    require_compiler()
    options: dict[str, Any] = {}
    if topology.name == "v4":  # a device is both cores of a chip
        options["chip_config_name"] = "megacore"
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    shape = f"{topology.name}:{'x'.join(map(str, topology.sizes))}"
    with _without_network():
        try:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=shape, **options
            )
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"libtpu knows no topology {shape}: {_first_line(error)}") from error
    return description.devices


@contextmanager
def _without_network() -> Iterator[None]:
    """Keeps libtpu from searching for a TPU, which it does when it is first used."""
    added = {name: value for name, value in _NO_TPU.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def compile_ahead(program: SpmdProgram, topology: Topology, flags: Mapping[str, Flag]) -> Compiled:
    """Compiles a program for TPU slices.

        compile_ahead(f.lower(x), Topology.parse("v5p:8x8x8"), RECOMMENDED["v5p"])

    Args:
        flags: the compiler's; see `backends.compiler_flags`.

    Raises:
        ValueError: the mesh does not cover the slices, libtpu is not installed, or it does not know
            a flag.
    """
    problems = topology.problems(program.mesh)
    if problems:
        raise ValueError("\n".join(problems))
    mesh = arrange_devices(program.mesh, devices(topology))
    start = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        # jaxlib cannot read all programs of libtpu, so the HLO comes from libtpu's dump.
        options = {**flags, "xla_dump_to": folder}
        donated = program.donated
        executable, memory = None, (0, 0)
        try:
            executable = Executable(program, donated, mesh, compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            memory = _too_large(error)
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        if executable is None:
            reason = "libtpu writes no program that does not fit"
            return Compiled(*memory, False, None, *seconds, unread=reason)
        wire_bytes, reason = _sent(Path(folder), program.mesh.size)
    peak = executable.memory_analysis().peak_memory_in_bytes
    return Compiled(peak, None, True, wire_bytes, *seconds, unread=reason)


def _sent(folder: Path, count: int) -> tuple[Mapping[str, float] | None, str]:
    """Returns the bytes that a device sends, by kind of collective, or why they are not known."""
    files = list(folder.glob("*.after_optimizations.txt"))
    if len(files) != 1:
        return None, f"libtpu wrote {len(files)} programs, not one"
    wire_bytes: dict[str, float] = collections.defaultdict(float)
    try:
        for collective in sent(files[0].read_text(), count):
            wire_bytes[collective.kind] += collective.wire_bytes * collective.count
    except ValueError as error:
        return None, str(error)
    return wire_bytes, ""


def _too_large(error: Exception) -> tuple[int, int]:
    """Returns the memory that a program needs and that a device has, in bytes, if it does not fit.

    Raises:
        ValueError: the compiler refused the program for another reason.
    """
    text = str(error)
    match = _USED.search(text)
    if "RESOURCE_EXHAUSTED" in text and match:
        needed, unit, available, available_unit = match.groups()
        return int(float(needed) * _UNITS[unit]), int(float(available) * _UNITS[available_unit])
    raise ValueError(f"libtpu refuses the program: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
