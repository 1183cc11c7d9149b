"""Which layers of a model have a window: `layer_types` of many families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.settings import Settings

KINDS = ("full_attention", "sliding_attention")


def windows(settings: Settings, usual: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a configuration for its windows.

    Args:
        usual: the kinds of the layers if `layer_types` does not list them.
    """
    kinds = settings.get("layer_types", usual)
    layers = settings.get("num_hidden_layers", 1)
    if not isinstance(kinds, list) or {*map(str, kinds)} - {*KINDS} or len(kinds) != layers:
        settings.problems.append(f"layer_types: needs {' or '.join(KINDS)} for each of the layers")
        return {}
    pattern = _shortest(tuple(KINDS.index(kind) for kind in kinds))
    window = settings.whole("sliding_window", None)
    if pattern == (0,) or window is None:
        return {}
    return {"window": window, "window_pattern": () if pattern == (1,) else pattern}


def layer_types(config: TransformerConfig) -> dict[str, Any]:
    """Returns the settings of windows."""
    pattern = config.window_pattern or (int(config.window is not None),)
    kinds = [KINDS[pattern[layer % len(pattern)]] for layer in range(config.layers)]
    return {"sliding_window": config.window, "layer_types": kinds}


def _shortest(kinds: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shortest pattern that gives these when it is repeated."""
    for size in range(1, len(kinds)):
        if all(kind == kinds[number % size] for number, kind in enumerate(kinds)):
            return kinds[:size]
    return kinds
