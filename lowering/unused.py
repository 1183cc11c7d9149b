"""What is asked for in vain, told as warnings: rules and options that fit, and do nothing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.validate import (
    LabelledTensor,
    LayoutWarning,
    ScopeWarning,
    idle_rules,
    misspelt_scopes,
)
from meshdsl.lowering.graphs.from_nothing import from_nothing
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph

_told: dict[Any, Any] = {}  # Python's registry of warnings, which tells each once per line


class OptionWarning(UserWarning):
    """An option changes nothing, or cannot be met."""


def paths_of(graph: Graph) -> list[str]:
    """Returns all that scopes can describe: paths of inputs and outputs, and of what is named."""
    found = dict.fromkeys([*graph.input_paths, *graph.output_paths, *graph.names.values()])
    for op in graph.operations:
        for body in op.bodies:
            found |= dict.fromkeys(paths_of(body))
    return [path for path in found if path]


def advise(graph: Graph, layout: Layout) -> None:
    """Warns of optional rules that never take an axis, and of scopes that look misspelt.

    Each is told once, with the line from which the program is lowered.
    """
    for text in idle_rules(layout, _tensors(graph, set())):
        _warn(text, LayoutWarning)
    for text in misspelt_scopes(layout, paths_of(graph)):
        _warn(text, ScopeWarning)


def tell(program: SpmdProgram, options: Options) -> None:
    """Warns of options that change nothing in a program, and of a limit that it does not keep."""
    for text in program.unused:
        _warn(text, OptionWarning)
    if options.memory is not None and program.peak_bytes > options.memory:
        from meshdsl.lowering.costs.units import show_bytes

        _warn(
            f"memory={show_bytes(options.memory)} is less than this takes however it is lowered: "
            f"at least {show_bytes(program.peak_bytes)}. Compute again instead of keeping "
            "(--remat=full, md.checkpoint), compute the batch in parts (--microbatches), split "
            "more, or give it more",
            OptionWarning,
        )


def _tensors(graph: Graph, made: set[Tensor]) -> Iterator[LabelledTensor]:
    """Yields the tensors that are somewhere; what is made of nothing (`made`) is not."""
    for tensors, paths in (
        (graph.inputs, graph.input_paths),
        (graph.outputs, graph.output_paths),
    ):
        for tensor, path in zip(tensors, paths, strict=False):
            yield path, tensor.shape, path, tensor.source
    for op in graph.operations:
        for body in op.bodies:
            held = zip(body.inputs, op.inputs, strict=False) if op.name == "scan" else ()
            made.update(inner for inner, outer in held if outer in made)
            yield from _tensors(body, made)
        if from_nothing(op, made):
            made.update(op.outputs)
            continue
        for tensor in op.outputs:
            path = graph.names.get(tensor, "")
            yield path, tensor.shape, path, tensor.source


def _warn(text: str, category: type[Warning]) -> None:
    frame = sys._getframe()
    # Decorators made by contextlib stand between our frames.
    ours = ("meshdsl.", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *place, registry=_told)
