"""Backends: each maps the instructions of a program to a framework, and is imported when used."""

from __future__ import annotations

import importlib
from types import ModuleType

from meshdsl.dims import did_you_mean

BACKENDS = ("jax", "jax_auto", "tf", "numpy")


class DeviceError(RuntimeError):
    """What failed on the devices, through no fault of the program's author; told in full."""


def load(name: str) -> ModuleType:
    """Returns the module of a backend.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in BACKENDS:
        hint = did_you_mean(name, BACKENDS)
        raise ValueError(f"unknown backend {name!r}; choose one of {', '.join(BACKENDS)}{hint}")
    return importlib.import_module(f"meshdsl.lowering.backends.{name}")
