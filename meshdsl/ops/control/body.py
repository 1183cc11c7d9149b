"""Bodies: functions of tensors, each traced as a graph of its own, for operations with bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshdsl.ops.creation import as_tensor
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, TracedTensor
from meshdsl.tracing.source import Source, user_definition
from meshdsl.tracing.trace import Trace, current, tracing


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree is a tensor, or an array to be made one."""
    return isinstance(leaf, Tensor)


def leaves_of(tree: Any) -> tuple[list[Tensor], Any]:
    """Returns a tree's leaves as tensors, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_array)
    return [as_tensor(leaf) for leaf in leaves], structure


def results_of(tree: Any, source: Source) -> tuple[list[Tensor], Any]:
    """Returns what a traced function returns as `leaves_of` does.

    Args:
        source: where the function is defined, or is used.

    Raises:
        ValueError: leaves that are no tensors; the error names all of them.
    """
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_array)
    problems = [
        f"{path_of(keys, 'result')} is of type {type(leaf).__name__}"
        for keys, leaf in keyed
        if not isinstance(leaf, Tensor | complex | float | int | np.generic)
    ]
    if problems:
        raise ValueError(
            f"a traced function returns tensors, but {'; '.join(problems)}: return a tensor, a "
            "Python number, or md.named(array, dims), which gives an array's dims their names\n"
            f"  in the function of {source}  {source.code}".rstrip()
        )
    return leaves_of(tree)


def subgraph(function: Callable, like: Sequence[Tensor]) -> tuple[Graph, tuple[Tensor, ...], Any]:
    """Traces a function of tensors by itself.

    Returns:
        Its graph (inputs: captured tensors, then one per `like`), the captured tensors as the
        enclosing trace has them, and the structure of the result.
    """
    inner = Trace(current())
    with tracing(inner):
        inputs = [inner.input(t.shape, t.dtype, t.source) for t in like]
        result = function(*inputs)
        # A function of meshdsl may stand around the user's.
        outputs, structure = results_of(result, user_definition(function))
        graph, consts = inner.finish(outputs)
    return graph, consts, structure


def traced_call(
    function: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Graph, list[Tensor], Any]:
    """Traces a call of a user's function by itself.

    The tensors among the arguments become inputs. Numbers, flags and the like belong to the
    function.

    Returns:
        Its graph (inputs: captured tensors, then the tensors of `(args, kwargs)` in tree order),
        the tensors to give it, and the structure of the result.
    """
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_array)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    operands = [as_tensor(leaves[i]) for i in places]

    def of_tensors(*tensors: Tensor) -> Any:
        for i, tensor in zip(places, tensors, strict=True):
            leaves[i] = tensor
        positional, named = jax.tree.unflatten(tree, leaves)
        return function(*positional, **named)

    graph, captured, structure = subgraph(of_tensors, operands)
    return graph, [*captured, *operands], structure


def check_carry(
    carry: Any, before: Sequence[Tensor], tree: Any, after: Sequence[Tensor], out_tree: Any
) -> None:
    """Raises ValueError unless a loop's carry keeps its structure, dims and dtypes."""
    if tree != out_tree:
        raise ValueError(f"the body returns a carry of another structure: {out_tree}, not {tree}")
    paths = [path_of(keys, "carry") for keys, _ in jax.tree_util.tree_flatten_with_path(carry)[0]]
    problems = [
        f"{path} goes in as {old} and comes out as {new} (made at {new.source}){_repair(old, new)}"
        for path, old, new in zip(paths, before, after, strict=True)
        if set(old.shape) != set(new.shape) or old.dtype != new.dtype
    ]
    if problems:
        raise ValueError("the carry must keep its dims and dtypes: " + "; ".join(problems))


def _repair(old: Tensor, new: Tensor) -> str:
    """Returns what to do about a result that has not the dims or the dtype of its carry."""
    if old.dtype != new.dtype:
        return f"; cast it: md.cast(x, {old.dtype.name!r})"
    gone = [dim for dim in old.shape if new.shape.find(dim.name) is None]
    come = [dim for dim in new.shape if old.shape.find(dim.name) is None]
    if len(gone) == len(come) == 1 and gone[0].size == come[0].size:
        return f"; rename it at the end of the body: x.rename({come[0].name}={gone[0].name!r})"
    return "; return it with the dims it came in, or as what the loop stacks"


def share_captured(
    traced: Sequence[tuple[Graph, Sequence[Tensor]]],
) -> tuple[list[Graph], tuple[Tensor, ...]]:
    """Gives several bodies one list of captured tensors.

    Args:
        traced: bodies with the tensors that they capture, their first inputs.

    Returns:
        The bodies and the captured tensors. Each body has an input for every captured tensor first.
    """
    everything = tuple(dict.fromkeys(t for _, captured in traced for t in captured))
    graphs = []
    for graph, captured in traced:
        known = dict(zip(captured, graph.inputs, strict=False))
        first = [
            known[t] if t in known else TracedTensor(t.shape, t.dtype, t.source) for t in everything
        ]
        own = graph.inputs[len(captured) :]
        graphs.append(Graph((*first, *own), graph.operations, graph.outputs))
    return graphs, everything
