"""TensorFlow is an extra: loading the backend requires it, and reports if it is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_OF_JAX = "1"  # what JAX sets it to, whoever imports it
LEAST = (2, 18)
INSTALL = "pip install 'meshdsl[tf]'"


def tensorflow() -> None:
    """Checks that TensorFlow is installed, and silences its messages about its build.

    With them go those of its search for GPUs. Whoever imports it before, or sets
    `TF_CPP_MIN_LOG_LEVEL` to another level than JAX does, sees them all.

    Raises:
        ValueError: it is missing or too old.
    """
    installed = version()
    least = ".".join(map(str, LEAST))
    if installed is None:
        raise ValueError(f"backend 'tf' needs TensorFlow, which is not installed: {INSTALL}")
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < LEAST:
        raise ValueError(
            f"backend 'tf' needs TensorFlow {least} or later, but {installed} is installed: "
            f"{INSTALL}"
        )
    if os.environ.get(_LEVEL, _OF_JAX) == _OF_JAX and "tensorflow" not in sys.modules:
        os.environ[_LEVEL] = "2"
        with _quiet():
            # It looks for GPUs only once asked, and complains then that there are none.
            importlib.import_module("tensorflow").config.list_physical_devices("GPU")


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops messages that libraries write to stderr directly, not through Python."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def version() -> str | None:
    """Returns the version of the installed TensorFlow, under any package name, or None."""
    for name in ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-tpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
