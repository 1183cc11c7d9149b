"""Checkpoint: rematerialisation (Chen et al. 2016, "Training deep nets with sublinear memory").

A `checkpoint` operation keeps only its inputs for the backward pass, which replays its body. The
replay starts at a `barrier`, so that no later pass merges it with the forward computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshdsl.graph import Operation, Primitive, Tensor
from meshdsl.ops.body import leaves_of, subgraph
from meshdsl.replay import Cotangents, Replay
from meshdsl.trace import bind


def checkpoint(function: Callable) -> Callable:
    """Returns `function` so that its gradient computes its intermediate values again."""

    def rematerialised(*args: Any) -> Any:
        inputs, tree = leaves_of(args)
        graph, consts, out_tree = subgraph(
            lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), inputs
        )
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
