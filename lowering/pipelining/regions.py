"""Regions: parts of a graph in which each stage of a pipeline has its own values.

Inside a region, a tensor without the dim `stage` stands for one value per stage. The dim `stage` is
split over the axes of the pipeline. `enter` removes this dim at the start of a region, and `leave`
adds it at the end. So a region is a function that is mapped over `stage`, like the body of `vmap`.
Each operation of a region is local to a stage if the layout does not split its tensors over the
axes of the pipeline. `rewriting` checks this.

Outside of a region, a value is the same on all stages. Such a value enters a region by `vary`.
`vary` is the identity, but lowering reduces partial sums before it. Otherwise a stage would add its
own value to a partial sum.

Only lowering writes these operations. They never occur in a trace of a user. So they have no
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.shapes.slicing import index, window
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Primitive, Work
from meshdsl.tracing.trace import bind_one


def _enter_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    return [(x.shape.without([params["stage"].name]), x.dtype)]


def _leave_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    return [(Shape([params["stage"], *x.shape]), x.dtype)]


def _vary_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    return [(x.shape, x.dtype)]


def _deal_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    at = x.shape.position(params["layers"].name)
    return [(Shape([*x.shape[:at], *params["own"], *x.shape[at + 1 :]]), x.dtype)]


def _collect_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    rest = x.shape.without([d.name for d in params["own"]])
    return [(Shape([params["layers"], *rest]), x.dtype)]


# Partial sums of activations are reduced before they travel, because this sends fewer bytes. Stacks
# of layers and their gradients may be partial sums.
ENTER = Primitive("enter_stages", _enter_rule, work=Work.NONE)
LEAVE = Primitive("leave_stages", _leave_rule, work=Work.NONE)
DEAL = Primitive("deal_to_stages", _deal_rule, linear=(0,))
COLLECT = Primitive("collect_from_stages", _collect_rule, linear=(0,))
VARY = Primitive("vary_over_stages", _vary_rule, work=Work.NONE)


def enter(x: Tensor, stage: Dimension) -> Tensor:
    """Returns x without the dim `stage`: each stage gets its position of that dim."""
    return bind_one(ENTER, (x,), {"stage": stage})


def leave(x: Tensor, stage: Dimension) -> Tensor:
    """Returns the values of all stages, stacked along the first dim `stage`. Inverts `enter`."""
    return bind_one(LEAVE, (x,), {"stage": stage})


def vary(x: Tensor) -> Tensor:
    """Returns a tensor from outside of a region, for use inside of it."""
    return bind_one(VARY, (x,))


def deal(
    x: Tensor,
    layers: Dimension,
    own: Shape,
    axes: tuple[str, ...],
    placement: tuple[int, ...],
) -> Tensor:
    """Returns the chunks of each stage.

    Args:
        x: has the dim `layers`, with the layers of all chunks.
        own: the dims of the layers of a stage: the round, if there are several, and the layer.
        axes: the axes of the pipeline.
        placement: the stage of each chunk; a round has a chunk of each stage.

    Returns:
        x with the dims `own` instead of `layers`.
    """
    params = {"layers": layers, "own": own, "axes": axes, "placement": placement}
    return bind_one(DEAL, (x,), params)


def collect(
    x: Tensor,
    layers: Dimension,
    own: Shape,
    axes: tuple[str, ...],
    placement: tuple[int, ...],
) -> Tensor:
    """Returns the layers of all chunks, in the order of the model. Inverts `deal`."""
    params = {"layers": layers, "own": own, "axes": axes, "placement": placement}
    return bind_one(COLLECT, (x,), params)


def send(x: Tensor, stage: Dimension, by: int) -> Tensor:
    """Returns x of stage s - `by` on each stage s, modulo the number of stages."""
    sent = window(leave(x, stage), stage.name, -by % stage.size, stage.size, wrap=True)
    return enter(sent, stage)


def of_stage(x: Tensor, stage: Dimension, number: int) -> Tensor:
    """Returns the value of stage `number`, for use outside of the region."""
    return index(leave(x, stage), stage, number)
