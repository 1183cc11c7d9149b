"""Regions: tensors of which every stage of a pipeline has its own value.

Inside a region, a tensor without the dim `stage` stands for one value per stage, and a stage
computes on its own. `enter` leads into a region, `leave` out of it: the dim `stage`, which is split
over the axes of the pipeline, goes and comes back. A region is a function that is mapped over
`stage`, written without that dim. So each operation in it is local to a stage, if no layout splits
its tensors over the axes of the pipeline; `loops` checks this.

Values outside of a region are the same on all stages. They come in by `vary`: it is the identity,
but partial sums are reduced there, since a stage must not add its own value to a summand of another
one.

These operations occur in graphs that lowering has rewritten, never in those that users trace. So
they have no gradients.
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


# Activations are reduced before they travel, which sends a part of them. Stacks of layers, and
# their gradients, may be partial sums.
ENTER = Primitive("enter_stages", _enter_rule, work=Work.NONE)
LEAVE = Primitive("leave_stages", _leave_rule, work=Work.NONE)
DEAL = Primitive("deal_to_stages", _deal_rule, linear=(0,))
COLLECT = Primitive("collect_from_stages", _collect_rule, linear=(0,))
VARY = Primitive("vary_over_stages", _vary_rule, work=Work.NONE)


def enter(x: Tensor, stage: Dimension) -> Tensor:
    """Returns, on each stage, its position of the dim `stage`: x without that dim."""
    return bind_one(ENTER, (x,), {"stage": stage})


def leave(x: Tensor, stage: Dimension) -> Tensor:
    """Returns the values of all stages, stacked along the dim `stage` in front; see `enter`."""
    return bind_one(LEAVE, (x,), {"stage": stage})


def vary(x: Tensor) -> Tensor:
    """Returns a tensor that is the same on all stages, for use inside of a region."""
    return bind_one(VARY, (x,))


def deal(x: Tensor, layers: Dimension, own: Shape, axes: tuple[str, ...]) -> Tensor:
    """Returns each stage's own chunks of layers, dealt to the stages one after another.

    Args:
        x: has the dim `layers`, with all layers of all chunks.
        own: the dims of a stage's layers: the chunks, if they are several, and their layers.
        axes: the axes of the pipeline.

    Returns:
        x with the dims `own` in place of `layers`.
    """
    return bind_one(DEAL, (x,), {"layers": layers, "own": own, "axes": axes})


def collect(x: Tensor, layers: Dimension, own: Shape, axes: tuple[str, ...]) -> Tensor:
    """Returns the layers of each stage's own chunks, in the order of the model: undoes `deal`."""
    return bind_one(COLLECT, (x,), {"layers": layers, "own": own, "axes": axes})


def send(x: Tensor, stage: Dimension, by: int) -> Tensor:
    """Returns what the stage `by` before this one has; the first one receives from the last."""
    sent = window(leave(x, stage), stage.name, -by % stage.size, stage.size, wrap=True)
    return enter(sent, stage)


def of_stage(x: Tensor, stage: Dimension, number: int) -> Tensor:
    """Returns the value of one stage, for use outside of the region."""
    return index(leave(x, stage), stage, number)
