"""Kept: programs that a process of a job finds compiled when it starts again.

JAX's compilation cache is written by the first process alone. On CPUs it has another key in each
process, so the others would compile at every start. Here each process of a job keeps its own, in
the folder `process.N` of JAX's (`jax_compilation_cache_dir`), by two of JAX's rules: nothing is
kept without that folder, nor what was compiled in less time than
`jax_persistent_cache_min_compile_time_secs`. JAX's limit of the folder's size does not count these
files. What no process has used for a month is deleted when another program is kept.

A file is called by the text of its program, as JAX lowers it. To trace and lower takes JAX most of
the time of a start, so beside it is a file that is called by our program, and holds that name.

Guarantees:
    A program is loaded only if all that its machine code depends on is the same: the text of the
    program, the options, versions, settings and flags, the devices, and what the CPU can do.
    Without its text, only if all that the text follows from is the same too. What cannot be known
    gives no name: the code of a process that is no fork of a template, functions of the user's.
    Flags in a file of `XLA_FLAGS` are not known either; then nothing is kept.
    A file is complete or is not there. One that cannot be read or loaded is deleted, with a
    warning, and the program compiled anew. A file that cannot be written costs a warning.

As in JAX's cache, what is loaded is run: whoever can write the folder decides what this process
does.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import secrets
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from meshdsl.late import late
from meshdsl.lowering.backends.compiler_flags import Flag
from meshdsl.lowering.fingerprint import fingerprint
from meshdsl.lowering.program import SpmdProgram

_NAME = re.compile("[0-9a-f]{64}")
_OURS = re.compile(r"\.?[0-9a-f]{64}(\..*)?")  # programs, their names, and what is unfinished
_UNUSED = 30 * 24 * 3600.0  # seconds without use after which a file is deleted
_UNFINISHED = 3600.0  # seconds after which nobody writes an unfinished file any more
_DIGEST = hashlib.sha256().digest_size
_HIT, _MISS = (f"/jax/compilation_cache/cache_{what}" for what in ("hits", "misses"))
_REPORTED = "xla_debug_buffer_assignment_show_max"
_SEEN = threading.local()  # the events of the thread's last call of the compiler
# What Linux says of a CPU that machine code depends on: on x86 and on Arm.
_ABILITIES = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
)


def _installed(*names: str) -> list[str]:
    found = []
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return found


# As they were imported: others may be installed while this process runs.
_COMPILING = _installed("jax", "jaxlib")
_EMITTING = _installed("numpy", "ml_dtypes", "opt_einsum", "scipy")


def compiled(
    lower: Callable[[], Any],
    program: SpmdProgram,
    emitted: Sequence[Any],
    mesh: jax.sharding.Mesh,
    options: Mapping[str, Flag],
) -> Any:
    """Returns a program compiled: what this process has kept, or what `lower().compile()` makes.

    Args:
        lower: returns the program as `jax.jit(...).lower` does.
        program: what is lowered.
        emitted: whatever else its text depends on, but for the code and JAX's settings.
        options: those that the compiler is given.
    """
    folder = _folder(mesh)
    if folder is None:
        return lower().compile()
    case = _case(mesh, options)
    name = _file_of_name(folder, case, program, emitted)
    named = None if name is None else _read_name(name)
    if named is not None and (found := _loaded(named, program, mesh)) is not None:
        return found
    lowered = lower()
    file = _file(folder, case, lowered.as_text())
    if file is None:
        return lowered.compile()
    made = None if file == named else _loaded(file, program, mesh)
    if made is None:
        began = time.monotonic()
        made, is_new = _compiled(lowered)
        seconds = time.monotonic() - began
        if is_new and seconds >= _setting("jax_persistent_cache_min_compile_time_secs"):
            _keep(file, partial(_serialized, made))
            _clean(folder)
    # `Path.exists` would raise where this process may not look. And the code may have changed while
    # it lowered, so that the text may be of either.
    is_nameless = named != file and os.path.exists(file)
    if name is not None and is_nameless and _file_of_name(folder, case, program, emitted) == name:
        _keep(name, file.name.encode)
    return made


def _compiled(lowered: Any) -> tuple[Any, bool]:
    """Returns a compiled program, and whether it can be kept: it was compiled here.

    XLA writes one that it has read without parts of it, which then cannot run. So what JAX finds in
    its cache is compiled nevertheless, once: the next start finds it here, without lowering it.
    """
    events = _SEEN.events = set[str]()
    made = lowered.compile()
    if _HIT in events:
        # A flag of the compiler's reports, by whose value JAX's cache has no such program.
        return lowered.compile({_REPORTED: secrets.randbelow(2**31)}), True
    # The first process writes to JAX's cache whatever was not there, and JAX tells that.
    return made, jax.process_index() > 0 or _MISS in events


def _note(event: str, **_: Any) -> None:
    events: set[str] = getattr(_SEEN, "events", set())
    events.add(event)


jax.monitoring.register_event_listener(_note)


def _folder(mesh: jax.sharding.Mesh) -> Path | None:
    """Returns where this process keeps programs; None: JAX keeps them, or nothing does."""
    folder = _setting("jax_compilation_cache_dir")
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    enabled = folder and _setting("jax_enable_compilation_cache")
    # A program of one device is called by way of `jax.jit`, which would compile it again.
    if not enabled or not on_cpus or mesh.size == 1 or _abilities() is None:
        return None
    if jax.process_count() == 1 or _flags_are_in_a_file():
        return None
    return Path(folder) / f"process.{jax.process_index()}"


def _flags_are_in_a_file() -> bool:
    """Whether `XLA_FLAGS` names a file, whose content no key has."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    return bool(flags) and not flags.startswith("-")


def _case(mesh: jax.sharding.Mesh, options: Mapping[str, Flag]) -> str:
    """Returns all that machine code depends on beside the program."""
    devices = [(one.id, one.process_index, one.device_kind) for one in mesh.devices.flat]
    facts = [
        *(sorted(options.items()), sorted(jax.config.values.items())),
        *(_versions(), _abilities(), os.environ.get("XLA_FLAGS")),
        *(jax.process_index(), jax.process_count(), mesh.devices.shape, mesh.axis_names, devices),
        [one.id for one in jax.local_devices(backend="cpu")],
    ]
    return repr(facts)


def _file(folder: Path, case: str, text: str) -> Path | None:
    """Returns the file of a program by its text; None: it cannot be kept."""
    if "callback" in text:  # the address of a Python function is part of the machine code
        return None
    return folder / _hashed(case, text)


def _file_of_name(
    folder: Path, case: str, program: SpmdProgram, emitted: Sequence[Any]
) -> Path | None:
    """Returns the file with the name of a program's file; None: nobody can know its text.

    The text follows from the program, the code that emits it, the libraries which that calls, and
    the settings of JAX. Some of those that only the caller has, a mesh for example, cannot be
    listed: see `_is_plain`.
    """
    code, known = late("version of the loaded code")(), fingerprint(program)
    if code is None or known is None or not _is_plain():
        return None
    return folder / f"{_hashed(case, code, known, repr((*emitted, *_emitting())))}.name"


def _read_name(name: Path) -> Path | None:
    """Returns the file that a file names; None: there is none."""
    with suppress(OSError, ValueError):
        text = name.read_text("ascii")
        if _NAME.fullmatch(text):
            _mark_used(name)
            return name.parent / text
    return None


def _is_plain() -> bool:
    """Whether this thread has no settings, mesh or device of its own, by which JAX traces anew."""
    traced = []

    def probe() -> None:
        traced.append(1)

    function = jax.jit(probe)
    other = threading.Thread(target=function.trace)
    other.start()
    other.join()
    function.trace()
    return len(traced) == 1


def _hashed(*texts: str) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _loaded(file: Path, program: SpmdProgram, mesh: jax.sharding.Mesh) -> Any:
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
    _mark_used(file)
    try:
        return serialize_executable.deserialize_and_load(
            content[_DIGEST:],
            jax.tree.structure((program.block.inputs, {})),
            jax.tree.structure(program.block.outputs),
            here[0].client,
            [*mesh.devices.flat],
        )
    except Exception as error:  # whatever a compiler says of it: there is another way
        return _unusable(file, str(error).strip().partition("\n")[0] or type(error).__name__)


def _mark_used(file: Path) -> None:
    with suppress(OSError):  # another user's, who may read it only
        os.utime(file)


def _clean(folder: Path) -> None:
    """Deletes what nobody has used for long.

    Each process does it in its own folder, and in those of processes that are gone: the one of its
    number plus that of processes, and so on.
    """
    number = jax.process_index()
    while folder.is_dir():
        with suppress(OSError):  # it is deleted meanwhile
            for file in folder.iterdir():
                after = _UNFINISHED if file.name.startswith(".") else _UNUSED
                with suppress(OSError):
                    if _OURS.fullmatch(file.name) and file.stat().st_mtime < time.time() - after:
                        file.unlink()
        number += jax.process_count()
        folder = folder.with_name(f"process.{number}")


def _unusable(file: Path, reason: str) -> None:
    warnings.warn(
        f"the compiled program in {file} cannot be used: {reason}. It is deleted, and compiled "
        "again",
        stacklevel=2,
    )
    with suppress(OSError):
        file.unlink()


def _keep(file: Path, content: Callable[[], bytes]) -> None:
    """Writes a file as a whole or not at all."""
    unfinished = None
    try:
        written = content()
        file.parent.mkdir(parents=True, exist_ok=True)
        # Containers of several hosts may have the same process numbers, so these are no names.
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as stream:
            stream.write(written)
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


def _serialized(made: Any) -> bytes:
    content, _, _ = serialize_executable.serialize(made)
    return hashlib.sha256(content).digest() + content


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _versions() -> list[str]:
    return _COMPILING


def _emitting() -> list[str]:
    """Returns the versions of what takes part in emitting, but not in compiling."""
    return [sys.version, *_EMITTING]


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
