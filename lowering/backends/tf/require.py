"""TensorFlow is an extra: it is looked for when the backend is used, and told of if missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
LEAST = (2, 18)
INSTALL = "pip install 'meshdsl[tf]'"


def tensorflow() -> None:
    """Sees to it that TensorFlow can be imported, without its notes on how it was built.

    Raises:
        ValueError: it is missing or too old.
    """
    found = version()
    least = ".".join(map(str, LEAST))
    if found is None:
        raise ValueError(f"backend 'tf' needs TensorFlow, which is not installed: {INSTALL}")
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < LEAST:
        raise ValueError(
            f"backend 'tf' needs TensorFlow {least} or later, but {found} is installed: {INSTALL}"
        )
    if _LEVEL not in os.environ:
        os.environ[_LEVEL] = "2"
        with _quiet():
            importlib.import_module("tensorflow")


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops what libraries write past Python, before they know of any level of logging."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def version() -> str | None:
    """Returns the version of the TensorFlow that is installed, under any of its names."""
    for name in ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-tpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
