"""Whether a configuration is one of a family: fields that must have one value."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from meshdsl.models.configs import TransformerConfig

# Fields that change how a model is computed, but not what; and those of training alone.
_FREE = frozenset(
    "remat policy capacity report_dropped dispatch expert_peers balance_weight router_z_weight "
    "max_length".split()
)
_SIZES = frozenset("layers embed heads vocab kv_heads kv d_ff norm_eps".split())


def misfits(
    config: Any, free: str = "", of: type[TransformerConfig] = TransformerConfig, **fixed: Any
) -> list[str]:
    """Returns how a configuration differs from those of a family.

    Args:
        free: names of fields that may have any value, besides those of sizes.
        of: the class of the configurations of the family.
        fixed: the values that others must have; those that are not named, their defaults.
    """
    if type(config) is not of:
        kind = "decoder-only transformer" if of is TransformerConfig else of.__name__
        return [f"{type(config).__name__} is no {kind}"]
    wrong = differences(config, {*_FREE, *_SIZES, *free.split()}, fixed)
    return [*wrong, *(_rotary_misfits(config) if "rotary_scaling" in free else [])]


def _rotary_misfits(config: TransformerConfig) -> list[str]:
    """Returns what settings cannot say of how a configuration turns."""
    kind, length = config.rotary_scaling, config.max_length
    if kind == "dynamic" and config.rotary_original != length:
        original = config.rotary_original
        return [
            f"needs rotary_original={length} for dynamic scaling, as max_length, not {original}"
        ]
    if kind in ("linear", "dynamic", "llama3") and config.rotary_magnitude is not None:
        return [f"needs no rotary_magnitude for {kind} scaling"]
    return []


def differences(config: Any, free: set[str], fixed: dict[str, Any]) -> list[str]:
    """Returns the fields that have other values than they must; see `misfits`."""
    wrong = []
    for field in fields(config):
        if field.name in free:
            continue
        wanted, value = fixed.get(field.name, field.default), getattr(config, field.name)
        if value != wanted:
            wrong.append(f"needs {field.name}={wanted}, not {value}")
    return wrong
