"""Kept: programs that a process finds compiled when it starts again, where JAX keeps none.

JAX's compilation cache is written by the first process alone. On CPUs it has another key in each
process, so the others would compile at every start. Here each of them keeps its own, in the folder
`process.N` of JAX's (`jax_compilation_cache_dir`), by two of JAX's rules: nothing is kept without
that folder, nor what was compiled sooner than `jax_persistent_cache_min_compile_time_secs`. Nothing
is deleted: JAX's limit of the folder's size does not count these files.

Guarantees:
    A program is loaded only if all that its machine code depends on is the same: the text of the
    program, the options, versions, settings and flags, the devices, and what the CPU can do.
    A file is complete or is not there. One that cannot be read or loaded is compiled anew, with a
    warning, and replaced. A file that cannot be written costs a warning.

As in JAX's cache, what is loaded is run: whoever can write the folder decides what this process
does.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from meshdsl.lowering.backends.compiler_flags import Flag

_DIGEST = hashlib.sha256().digest_size
# What Linux says of a CPU that machine code depends on: on x86 and on Arm.
_ABILITIES = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)


def compiled(lowered: Any, mesh: jax.sharding.Mesh, options: Mapping[str, Flag]) -> Any:
    """Returns a lowered program compiled: the one that this process has kept, or a new one.

        compiled(jax.jit(f).lower(x), mesh, {})

    Args:
        lowered: what `jax.jit(...).lower` returned.
        options: those that the compiler is given.
    """
    file = _file(lowered, mesh, options)
    if file is None:
        return lowered.compile()
    if (found := _loaded(file, lowered, mesh)) is not None:
        return found
    began = time.monotonic()
    made = lowered.compile()
    if time.monotonic() - began >= _setting("jax_persistent_cache_min_compile_time_secs"):
        _keep(file, made)
    return made


def _file(lowered: Any, mesh: jax.sharding.Mesh, options: Mapping[str, Flag]) -> Path | None:
    """Returns where a program is kept; None: JAX keeps it, or nothing does."""
    folder = _setting("jax_compilation_cache_dir")
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    enabled = folder and _setting("jax_enable_compilation_cache")
    # A program of one device is called by way of `jax.jit`, which would compile it again.
    if not enabled or not on_cpus or mesh.size == 1 or _abilities() is None:
        return None
    if (number := jax.process_index()) == 0:
        return None
    text = lowered.as_text()
    if "callback" in text:  # the address of a Python function is part of the machine code
        return None
    digest = hashlib.sha256(text.encode())
    devices = [(one.id, one.process_index, one.device_kind) for one in mesh.devices.flat]
    facts = [
        *(sorted(options.items()), sorted(jax.config.values.items())),
        *(_versions(), _abilities(), os.environ.get("XLA_FLAGS")),
        *(number, jax.process_count(), mesh.devices.shape, devices),
        [one.id for one in jax.local_devices(backend="cpu")],
    ]
    digest.update(repr(facts).encode())
    return Path(folder) / f"process.{number}" / digest.hexdigest()


def _loaded(file: Path, lowered: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns the program of a file; None: it is to be compiled."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unusable(file, error.strerror or str(error))
    if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
        return _unusable(file, "it is damaged")
    here = [one for one in mesh.devices.flat if one.process_index == jax.process_index()]
    try:
        return serialize_executable.deserialize_and_load(
            content[_DIGEST:],
            lowered.in_tree,
            lowered.out_tree,
            here[0].client,
            [*mesh.devices.flat],
        )
    except Exception as error:  # whatever a compiler says of it: there is another way
        return _unusable(file, str(error).strip().partition("\n")[0] or type(error).__name__)


def _unusable(file: Path, reason: str) -> None:
    warnings.warn(
        f"the compiled program in {file} cannot be used: {reason}. It is compiled again, and "
        "replaced",
        stacklevel=2,
    )


def _keep(file: Path, made: Any) -> None:
    """Writes a program into its file, as a whole or not at all."""
    unfinished = None
    try:
        content, _, _ = serialize_executable.serialize(made)
        file.parent.mkdir(parents=True, exist_ok=True)
        for left in file.parent.glob(f".{file.name}.*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        # Containers of several hosts may have the same process numbers, so these are no names.
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.sha256(content).digest() + content)
        os.replace(unfinished, file)
    except Exception as error:  # the disk is full, or the program has what cannot be written
        warnings.warn(
            f"a compiled program is not kept in {file.parent}, so that the next start compiles it "
            f"again: {str(error).strip() or type(error).__name__}",
            stacklevel=2,
        )
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _versions() -> list[str]:
    return [importlib.metadata.version(name) for name in ("jax", "jaxlib")]


@cache
def _abilities() -> tuple[str, ...] | None:
    """Returns what the CPUs of this host can do; None: it is not known."""
    if sys.platform != "linux":
        return None
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return None
    lines = [line.partition(":") for line in first.splitlines()]
    return tuple(f"{n.strip()}:{v}" for n, _, v in lines if n.strip() in _ABILITIES) or None
