"""Unused: warnings about rules and options that fit a program but have no effect."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.validate import (
    LabelledTensor,
    LayoutWarning,
    ScopeWarning,
    idle_rules,
    misspelt_scopes,
    not_applying,
    scopes_of_other_arguments,
)
from meshdsl.lowering.graphs.creation import returned_anew
from meshdsl.lowering.graphs.from_nothing import from_nothing
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph

_warned: dict[Any, Any] = {}  # Python's registry of warnings: each is shown once per line


class OptionWarning(UserWarning):
    """An option changes nothing, or cannot be met."""


def paths_of(graph: Graph) -> list[str]:
    """Returns the paths that scopes can apply to: of inputs, outputs and named tensors."""
    paths = dict.fromkeys([*graph.input_paths, *graph.output_paths, *graph.names.values()])
    for op in graph.operations:
        for body in op.bodies:
            paths |= dict.fromkeys(paths_of(body))
    return [path for path in paths if path]


def warn_of_layout(graph: Graph, layout: Layout) -> None:
    """Warns of optional rules that never take an axis, and of scopes that are mistakes.

    A scope that applies to no path is one if it looks misspelt, or if it would fit with another
    argument's name in front: in a training step one that is returned anew, in other programs a
    tree, if the scope names `params` and no path does. So is one that begins with an argument of a
    training step.

    Each warning is shown once, with the user's line that lowers the program.
    """
    for text in idle_rules(layout, _tensors(graph, set())):
        _warn(text, LayoutWarning)
    paths = paths_of(graph)
    if not not_applying(layout, paths):
        return
    misspelt = misspelt_scopes(layout, paths)
    inputs = dict(zip(graph.input_paths, (tensor.shape for tensor in graph.inputs), strict=False))
    renewed = returned_anew(graph)
    others = scopes_of_other_arguments(layout, paths, inputs, graph.name, renewed)
    for text in (others | misspelt).values():
        _warn(text, ScopeWarning)


def warn_of_rules(texts: Iterable[str]) -> None:
    """Warns of rules that have less effect on a backend than on others."""
    for text in texts:
        _warn(text, LayoutWarning)


def warn_of_options(program: SpmdProgram, options: Options) -> None:
    """Warns of options without effect on a program, and of a limit on memory that it exceeds."""
    for text in program.unused:
        _warn(text, OptionWarning)
    if program.pipeline is None and any(i.source.backward for i, _ in program.block.walk()):
        for name, usual in (("pipeline", "auto"), ("pipeline_rounds", None)):
            if (value := getattr(options, name)) not in (usual, "none", 1):
                _warn(f"{name}={value} has no effect: {_why_no_pipeline(program)}", OptionWarning)
    if options.memory is not None and program.peak_bytes > options.memory:
        from meshdsl.lowering.costs.units import show_bytes

        _warn(
            f"memory={show_bytes(options.memory)} is less than the program needs however it is "
            f"lowered: at least {show_bytes(program.peak_bytes)}. Recompute activations instead of "
            "keeping them (--remat=full, md.checkpoint), compute the batch in parts "
            "(--microbatches), split more dims, or allow more memory",
            OptionWarning,
        )


def _why_no_pipeline(program: SpmdProgram) -> str:
    """Returns why a training step is no pipeline."""
    if any(i.op == "scan" and i.params["dim"] == "layers" for i, _ in program.block.walk()):
        return "no rule of the layout, as layers:pipe, makes a pipeline of the layers"
    return (
        "the model has no stack of layers, which a pipeline divides among its stages: write its "
        'layers as md.scan(..., dim="layers"), or split other dims'
    )


def _tensors(graph: Graph, constant: set[Tensor]) -> Iterator[LabelledTensor]:
    """Yields the tensors that have a layout; constants have none. `constant` collects them."""
    for tensors, paths in (
        (graph.inputs, graph.input_paths),
        (graph.outputs, graph.output_paths),
    ):
        for tensor, path in zip(tensors, paths, strict=False):
            yield path, tensor.shape, path, tensor.source
    for op in graph.operations:
        for body in op.bodies:
            inputs = zip(body.inputs, op.inputs, strict=False) if op.name == "scan" else ()
            constant.update(inner for inner, outer in inputs if outer in constant)
            yield from _tensors(body, constant)
        if from_nothing(op, constant):
            constant.update(op.outputs)
            continue
        for tensor in op.outputs:
            path = graph.names.get(tensor, "")
            yield path, tensor.shape, path, tensor.source


def _warn(text: str, category: type[Warning]) -> None:
    frame = sys._getframe()
    # Frames of decorators made by contextlib lie between frames of this package.
    ours = ("meshdsl.", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *line, registry=_warned)
