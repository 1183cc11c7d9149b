"""How positions enter: added embeddings, rotations, or a bias on the scores."""

from __future__ import annotations

from typing import TypedDict

import meshdsl as md
from meshdsl import nn
from meshdsl.models.configs import TransformerConfig
from meshdsl.models.layers.drawing import Drawing
from meshdsl.tensors.dims import Dimension


def init_learned(config: TransformerConfig, draw: Drawing) -> md.Tensor | None:
    """Returns embeddings of positions [max_length, embed], if the configuration has them."""
    _, embed, *_, max_length = config.dims
    return draw.normal(0.02, [max_length, embed]) if config.positions == "learned" else None


def init_distances(config: TransformerConfig, draw: Drawing) -> md.Tensor | None:
    """Returns biases of distances [buckets, heads, group], if the configuration has them."""
    if config.positions != "relative":
        return None
    buckets = Dimension("buckets", config.relative_buckets)
    return draw.normal(0.02, [buckets, config.dims[2], *config.group_dims])


def first_positions(positions: md.Tensor, length: Dimension, start: int = 0) -> md.Tensor:
    """Returns the embeddings of the first positions: [length, embed].

    Args:
        start: rows of the table before that of the first position.

    Raises:
        ValueError: `length` is more than the learned positions.
    """
    rows = positions.shape.get("max_length").size
    needed = start + length.size
    if needed > rows:
        before = f", of which the first {start} are of no position" if start else ""
        raise ValueError(
            f"length={length.size} is more than the max_length={rows} learned positions{before}; "
            f"use a shorter length, or a model with max_length={needed}"
        )
    if length.size == rows:
        return positions.rename(max_length=length.name)
    return positions["max_length", start:needed].rename(max_length=length.name)


def learned_positions(
    table: md.Tensor, length: Dimension, positions: md.Tensor | None = None
) -> md.Tensor:
    """Returns the embeddings of positions, of the first ones by default; errors as there."""
    first = first_positions(table, length)
    return first if positions is None else md.take(table, positions, "max_length")


class Rotations(TypedDict):
    """The rotations of `Shared`, by their names there."""

    rotation: nn.Rotation | None
    window_rotation: nn.Rotation | None


def rotations_of(
    config: TransformerConfig,
    length: Dimension,
    positions: md.Tensor | None = None,
    reach: int | None = None,
) -> Rotations:
    """Returns the tables of rotary positions: of all layers, and others for those with a window.

    Args:
        reach: of a text that is read in steps: how many positions there is room for.
    """
    of_window, base = None, config.rotary_window_base
    if base is not None:
        of_window = nn.rotation(length, Dimension("kv", config.kv_size), base, positions)
    rotation = rotation_of(config, length, positions, reach)
    return {"rotation": rotation, "window_rotation": of_window}


def rotation_of(
    config: TransformerConfig,
    length: Dimension,
    positions: md.Tensor | None = None,
    reach: int | None = None,
) -> nn.Rotation | None:
    """Returns the tables of rotary positions, if the configuration has them."""
    if config.positions != "rotary":
        return None
    features = Dimension("kv", config.kv_size)
    if config.attention == "latent":
        features = Dimension("rotary_kv", config.rotary_kv_size)
    return nn.rotation(length, features, config.rotary_base, positions, config.scaling, reach)


def distance_bias(
    config: TransformerConfig,
    table: md.Tensor | None,
    length: Dimension,
    causal: bool,
    slots: nn.Slots | None = None,
) -> md.Tensor | None:
    """Returns what is added to the scores: [heads, group, length, memory_length], or None.

    Args:
        table: [buckets, heads, group], with positions="relative".
        slots: of a cache that is attended to, with its memory_length.
    """
    memory, positions = Dimension("memory_length", length.size), list[md.Tensor]()
    if slots is not None:
        memory, positions = slots.memory, [slots.positions, slots.memory_positions]
    if table is not None:
        far = config.relative_distance
        return nn.relative_bias(table, length, memory, causal, far, "buckets", *positions)
    if config.positions == "alibi":
        return nn.alibi_bias([config.dims[2], *config.group_dims], length, memory, *positions)
    return None
