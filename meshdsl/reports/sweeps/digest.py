"""Digest: what identifies a measurement.

A resumed sweep takes over a result only if nothing has changed that it depends on: the traced step
with its sizes and constants, the code that made and lowered it, what is asked for, and the
candidate.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl.lowering.writing.loops import within
from meshdsl.tracing.graph import Graph, TensorNames

_PACKAGES = ("meshdsl", "meshdsl.layouts", "meshdsl.lowering", "meshdsl.models")


def digest(graph: Graph, *facts: object) -> str:
    """Returns a checksum, in hexadecimal, of a graph and of facts that differ in their text."""
    checksum = hashlib.sha256()
    for part in (*map(repr, facts), *_written(graph, TensorNames())):
        checksum.update(part.encode() + b"\0")
    for file in _files(graph):
        checksum.update(file.name.encode() + b"\0" + file.read_bytes())
    return checksum.hexdigest()


def key(step: str, candidate: object) -> str:
    """Returns the name of a candidate's result, given the digest of what is measured."""
    return hashlib.sha256(f"{step}\0{candidate}".encode()).hexdigest()[:16]


def _written(graph: Graph, printer: TensorNames) -> Iterator[str]:
    """Yields a graph as texts that do not differ from one process to the next."""
    for tensor, path in zip(graph.inputs, graph.input_paths or graph.inputs, strict=True):
        yield f"{printer.name(tensor)} {tensor} {path if isinstance(path, str) else ''}"
    for op in graph.operations:
        yield " ".join([op.name, *map(printer.name, op.inputs)])
        yield " ".join(f"{printer.name(tensor)} {tensor}" for tensor in op.outputs)
        for name, value in sorted(op.params.items()):
            yield name
            yield from _written(value, printer) if isinstance(value, Graph) else _texts(value)
    yield " ".join(map(printer.name, graph.outputs))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    elif callable(value):  # the file that it stands in is part of the digest
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    else:
        yield repr(value)


def _files(graph: Graph) -> Iterable[Path]:
    """Returns the files of the code: those that operations were written in, and our own."""
    files = {Path(op.source.file) for op in within(graph)}
    for name in _PACKAGES:
        for folder in importlib.import_module(name).__path__:
            files |= set(Path(folder).rglob("*.py"))
    return sorted(file for file in files if file.is_file())
