"""Feed-forward layers of two kinds: one MLP for all tokens, and a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers.drawing import Drawing
from meshdsl.tensors.dims import Dimension

ACTIVATIONS: dict[str, Callable[[md.Tensor], md.Tensor]] = {
    "gelu": md.gelu,
    "exact_gelu": partial(md.gelu, approximate=False),
    "relu": md.relu,
    "swiglu": md.silu,
    "geglu": md.gelu,
}


class MLP(md.Module):
    """Two projections with an activation between; with `w_gate`, what it activates is a factor."""

    w_in: md.Tensor  # embed, d_ff
    w_gate: md.Tensor | None  # embed, d_ff
    w_out: md.Tensor  # d_ff, embed
    bias_in: md.Tensor | None
    bias_out: md.Tensor | None
    kind: str = md.static()

    def __call__(self, x: md.Tensor) -> md.Tensor:
        activation = ACTIVATIONS[self.kind]
        if self.w_gate is not None:
            return nn.gated_mlp(x, self.w_gate, self.w_in, self.w_out, activation=activation)
        return nn.mlp(x, self.w_in, self.w_out, self.bias_in, self.bias_out, activation=activation)


class Experts(md.Module):
    """A mixture of experts: a router sends each token to some of many MLPs."""

    router: md.Tensor  # embed, routed
    bias: md.Tensor | None  # routed, float32; decides with the scores who is chosen
    experts: MLP  # with the dim `experts` in front
    shared: MLP | None  # for all tokens, beside them
    choices: int = md.static()
    capacity: float | None = md.static()
    dispatch: Literal["einsum", "gather", "sort"] = md.static()
    peers: int = md.static()  # with dispatch "sort"
    options: tuple[tuple[str, Any], ...] = md.static()  # of `nn.route`
    report_dropped: bool = md.static()

    def __call__(self, x: md.Tensor) -> tuple[md.Tensor, nn.RouterLosses]:
        routing = nn.route(x, self.router, self.choices, bias=self.bias, **dict(self.options))
        slots, losses = None, routing.losses
        if self.capacity is not None:
            peers = self.peers if self.dispatch == "sort" else None
            share = x.shape.get("length").size * self.choices / (peers or routing.experts)
            slots = math.ceil(self.capacity * share)
            if self.report_dropped:
                losses = replace(losses, dropped=nn.dropped_choices(routing, slots, peers=peers))
        y = nn.moe(x, routing, self.experts, slots, dispatch=self.dispatch, peers=self.peers)
        return (y if self.shared is None else y + self.shared(x)), losses


def undropping(mlp: MLP | Experts) -> MLP | Experts:
    """Returns the layer without the capacity of its experts, so that it drops no token."""
    if isinstance(mlp, Experts):
        return replace(mlp, capacity=None, report_dropped=False)
    return mlp


def init_mlp(
    config: TransformerConfig, draw: Drawing, front: Sequence[Dimension], dense: bool = False
) -> MLP | Experts:
    """Returns the feed-forward layer of the configuration; `front` dims stack several.

    Args:
        dense: whether it is one MLP for all tokens, where other layers have experts.
    """
    _, embed, _, _, d_ff, *_ = config.dims
    if dense or not config.experts:
        hidden = Dimension("d_ff", config.dense_d_ff_size) if dense else d_ff
        return _mlp(config, draw, front, hidden)
    experts, routed = md.dims(experts=config.experts, routed=config.experts)
    shared = None
    if config.shared_experts:
        hidden = Dimension("d_ff", config.shared_experts * d_ff.size)
        shared = _mlp(config, draw, front, hidden)
    return Experts(
        router=draw.into(embed, [*front, embed, routed]),
        bias=md.zeros([*front, routed]) if config.router_bias else None,
        experts=_mlp(config, draw, [*front, experts], d_ff),
        shared=shared,
        choices=config.experts_per_token,
        capacity=config.capacity,
        dispatch=config.dispatch,
        peers=config.expert_peers,
        options=config.router_options,
        report_dropped=config.report_dropped,
    )


def _mlp(
    config: TransformerConfig, draw: Drawing, front: Sequence[Dimension], d_ff: Dimension
) -> MLP:
    embed = config.dims[1]
    biased = config.bias and not config.gated
    return MLP(
        w_in=draw.into(embed, [*front, embed, d_ff]),
        w_gate=draw.into(embed, [*front, embed, d_ff]) if config.gated else None,
        w_out=draw.into(d_ff, [*front, d_ff, embed], config.quieter),
        bias_in=draw.zeros([*front, d_ff]) if biased else None,
        bias_out=draw.zeros([*front, embed]) if biased else None,
        kind=config.mlp,
    )
