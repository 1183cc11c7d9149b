"""Backends: each maps the instructions of a program to a framework. Imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from meshdsl.tensors.dims import did_you_mean

if TYPE_CHECKING:
    from meshdsl.lowering.backends.contract import Backend, BackendOnJax, Executable
    from meshdsl.lowering.program import SpmdProgram

BACKENDS = ("jax", "jax_auto", "tf", "numpy")
ON_JAX = ("jax", "jax_auto")  # their programs can be part of a function that JAX traces


class DeviceError(RuntimeError):
    """A failure on the devices that is not the user's mistake; its message reports all of it."""


def load(name: str) -> Backend:
    """Returns the module of a backend; `contract` says what it has.

    Raises:
        ValueError: no backend has that name, or its folder or a part of the contract is missing.
    """
    if name not in BACKENDS:
        hint = did_you_mean(str(name), BACKENDS)
        raise ValueError(f"unknown backend {name!r}; choose one of {', '.join(BACKENDS)}{hint}")
    module = f"meshdsl.lowering.backends.{name}"
    try:
        backend = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the backend is there, but not the framework that it imports
            raise
        raise ValueError(
            f"backend {name!r} is listed in BACKENDS of lowering/backends/__init__.py, but has no "
            f"folder: write lowering/backends/{name}/__init__.py, as "
            "lowering/backends/contract.py says"
        ) from None
    from meshdsl.lowering.backends.contract import missing_parts  # it reads `lowering.program`

    lacking = missing_parts(backend)
    if lacking:
        raise ValueError(
            f"backend {name!r} lacks {', '.join(lacking)}: define them in "
            f"lowering/backends/{name}, as lowering/backends/contract.py says"
        )
    return cast("Backend", backend)


def load_on_jax(name: str = "jax") -> BackendOnJax:
    """Returns the module of a backend of `ON_JAX`."""
    assert name in ON_JAX
    return cast("BackendOnJax", load(name))


def executable(
    backend: Backend,
    program: SpmdProgram,
    donated: Sequence[bool] = (),
    devices: Any = None,
) -> Executable:
    """Compiles a program for a backend: `executable(load("numpy"), program)`."""
    return backend.Executable(program, donated, devices)
