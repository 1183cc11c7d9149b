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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.experimental import topologies

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering import backends
from meshdsl.lowering.backends.compiler_flags import Flag
from meshdsl.lowering.backends.hlo.schedule import schedule
from meshdsl.lowering.backends.hlo.wire import sent
from meshdsl.lowering.backends.jax.torus import arrange_devices
from meshdsl.lowering.compiled import Compiled
from meshdsl.lowering.program import SpmdProgram

T = TypeVar("T")

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


def compile_ahead(
    program: SpmdProgram, topology: Topology, flags: Mapping[str, Flag], backend: str = "jax"
) -> Compiled:
    """Compiles a program for a machine of TPUs.

        compile_ahead(f.lower(x), Topology.parse("v5p:8x8x8"), RECOMMENDED["v5p"])

    Args:
        flags: the compiler's; see `backends.compiler_flags`.
        backend: `jax`, or `jax_auto` for a program that it has lowered.

    Raises:
        ValueError: the mesh does not cover the slices, libtpu is not installed, or it does not know
            a flag.
    """
    mesh = _mesh(program.mesh, topology)
    kind = backends.load(backend).Executable

    def compiled(options: Mapping[str, Flag]) -> Any:
        return kind(program, program.donated, mesh, compiler_options=options)

    return _compile(compiled, program.mesh, topology, flags)


def plain_program(
    make: Callable[[jax.sharding.Mesh], Any], mesh: Mesh, topology: Topology
) -> tuple[Any, ...]:
    """Returns a plain JAX program for a machine of TPUs: what `jax.jit` returned, and arguments.

    Args:
        make: returns it for the devices of the mesh; the arguments may be `jax.ShapeDtypeStruct`
            with shardings.

    Raises:
        ValueError: `make` returns something else; or as in `compile_ahead`.
    """
    program = make(_mesh(mesh, topology))
    if not (isinstance(program, tuple) and program and hasattr(program[0], "lower")):
        made = type(program).__name__
        if isinstance(program, tuple) and program:
            made += f" of {', '.join(type(one).__name__ for one in program)}"
        raise ValueError(
            f"{getattr(make, '__name__', make)} returns a {made}; it must return what jax.jit "
            "returned, and the arguments: return jax.jit(step), state, batch"
        )
    return program


def compile_plain(
    program: tuple[Any, ...], mesh: Mesh, topology: Topology, flags: Mapping[str, Flag]
) -> Compiled:
    """Compiles a plain JAX program, as `plain_program` returns it, for a machine of TPUs.

    Raises:
        ValueError: as in `compile_ahead`.
    """
    function, *arguments = program
    lowered = function.lower(*arguments)
    return _compile(
        lambda options: lowered.compile(compiler_options=dict(options)), mesh, topology, flags
    )


def _mesh(mesh: Mesh, topology: Topology) -> jax.sharding.Mesh:
    """Returns the devices of a mesh on a machine.

    Raises:
        ValueError: the mesh does not cover it.
    """
    problems = topology.problems(mesh)
    if problems:
        raise ValueError("\n".join(problems))
    return arrange_devices(mesh, devices(topology))


def _compile(
    compiled: Callable[[Mapping[str, Flag]], Any],
    mesh: Mesh,
    topology: Topology,
    flags: Mapping[str, Flag],
) -> Compiled:
    """Returns the compiler's account.

    Args:
        compiled: compiles with some flags.
    """
    start = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        # jaxlib cannot read all programs of libtpu, so the HLO comes from libtpu's dump.
        executable, memory = None, (0, 0)
        try:
            executable = compiled({**flags, "xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            memory = _too_large(error)
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        if executable is None:
            reason = "libtpu writes no program that does not fit"
            return Compiled(*memory, False, None, *seconds, unread=reason, untimed=reason)
        text, reason = _text(Path(folder))
    peak = executable.memory_analysis().peak_memory_in_bytes
    if reason:
        return Compiled(peak, None, True, None, *seconds, unread=reason, untimed=reason)
    wire_bytes, unread = _known(lambda: _sent(text, mesh.size))
    times, untimed = _known(lambda: schedule(text, mesh, topology.hardware))
    return Compiled(peak, None, True, wire_bytes, *seconds, unread, times, untimed)


def _known(read: Callable[[], T]) -> tuple[T | None, str]:
    """Returns what is read off a program, or the reason why it is not known."""
    try:
        return read(), ""
    except ValueError as error:
        return None, str(error)


def _text(folder: Path) -> tuple[str, str]:
    """Returns the program that libtpu wrote, or why there is none.

    Only what it writes after code generation has the compiler's estimates of cycles.
    """
    files: list[Path] = []
    for stage in ("after_codegen", "after_optimizations"):
        files = list(folder.glob(f"*.{stage}.txt"))
        if len(files) == 1:
            return files[0].read_text(), ""
    return "", f"libtpu wrote {len(files)} programs, not one"


def _sent(text: str, devices: int) -> Mapping[str, float]:
    """Returns what a device sends by the optimised program, by kind."""
    totals: dict[str, float] = collections.defaultdict(float)
    for one in sent(text, devices):
        totals[one.kind] += one.wire_bytes * one.count
    return totals


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
