"""Checkpoint: rematerialisation (Chen et al. 2016, "Training deep nets with sublinear memory").

A `checkpoint` operation keeps only its inputs for the backward pass, which replays its body. The
replay starts at a `barrier`, so that no later pass merges it with the forward computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshdsl.graph import Operation, Primitive, Tensor
from meshdsl.ops.body import is_array, subgraph
from meshdsl.ops.creation import as_tensor
from meshdsl.replay import Cotangents, Replay
from meshdsl.trace import bind


def checkpoint(function: Callable) -> Callable:
    """Returns `function` so that its gradient computes its intermediate values again.

    Tensors among its arguments are kept; numbers, flags and the like belong to the function.
    """

    @functools.wraps(function)
    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_array)
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        inputs = [as_tensor(leaves[i]) for i in places]

        def of_tensors(*tensors: Tensor) -> Any:
            for i, tensor in zip(places, tensors, strict=True):
                leaves[i] = tensor
            given, named = jax.tree.unflatten(tree, leaves)
            return function(*given, **named)

        graph, consts, out_tree = subgraph(of_tensors, inputs)
        outputs = bind(CHECKPOINT, [*consts, *inputs], {"body": graph.prune()}).outputs
        return jax.tree.unflatten(out_tree, outputs)

    return rematerialised


def _replay(
    op: Operation, arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Sequence[Tensor], Callable]:
    outputs = bind(CHECKPOINT, arguments, op.params).outputs

    def pullback(cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
        again = bind(BARRIER, arguments).outputs
        replayed = Replay(op.params["body"], again, wanted)
        arriving = zip(cotangents, replayed.active_outputs, strict=True)
        return replayed.backward([c if on else None for c, on in arriving])

    return outputs, pullback


CHECKPOINT = Primitive(
    "checkpoint",
    lambda inputs, params: [(t.shape, t.dtype) for t in params["body"].outputs],
    replay=_replay,
)
BARRIER = Primitive(
    "barrier",
    lambda inputs, params: [(t.shape, t.dtype) for t in inputs],
    lambda op, cotangents, wanted: list(cotangents),
)
