"""Layers as functions of named tensors, written in the language itself."""

from meshdsl.nn import initializers
from meshdsl.nn.caching import PagedSlots, Pages, Slots, slots_needed
from meshdsl.nn.losses import mean_where, softmax_cross_entropy
from meshdsl.nn.mlp import gated_mlp, mlp
from meshdsl.nn.moe import moe
from meshdsl.nn.norms import batch_norm, group_norm, layer_norm, rms_norm
from meshdsl.nn.positions import (
    RotaryScaling,
    Rotation,
    alibi_bias,
    relative_bias,
    rotary,
    rotation,
)
from meshdsl.nn.queues import dropped_choices
from meshdsl.nn.routing import RouterLosses, Routing, balance_bias, route
from meshdsl.nn.sampling import penalise_seen, row_noise, sample

__all__ = [
    "PagedSlots",
    "Pages",
    "RotaryScaling",
    "Rotation",
    "RouterLosses",
    "Routing",
    "Slots",
    "alibi_bias",
    "balance_bias",
    "batch_norm",
    "dropped_choices",
    "gated_mlp",
    "group_norm",
    "initializers",
    "layer_norm",
    "mean_where",
    "mlp",
    "moe",
    "penalise_seen",
    "relative_bias",
    "rms_norm",
    "rotary",
    "rotation",
    "route",
    "row_noise",
    "sample",
    "slots_needed",
    "softmax_cross_entropy",
]
