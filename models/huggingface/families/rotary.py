"""How rotary positions are scaled: `rope_scaling` of transformers 4, `rope_parameters` of 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshdsl.models.configs import TransformerConfig
from meshdsl.models.huggingface.settings import Settings

# The fields that say it.
ROTARY = (
    "rotary_base rotary_scaling rotary_factor rotary_low rotary_high rotary_original rotary_short "
    "rotary_long rotary_magnitude"
)
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_NAMES = {"su": "longrope"}  # of old folders
# Of a kind: its settings, with the fields that have these values.
_TURNS = {
    "llama3": {"low_freq_factor": "rotary_low", "high_freq_factor": "rotary_high"},
    "yarn": {"beta_slow": "rotary_low", "beta_fast": "rotary_high"},
}
_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}


def rotary(settings: Settings) -> dict[str, Any]:
    """Returns the fields of rotary positions."""
    values = settings.get("rope_parameters", None) or settings.get("rope_scaling", None) or {}
    if not isinstance(values, Mapping):
        settings.problems.append(f"rope_parameters={values!r}: needs an object of settings")
        return {}
    inner = Settings(values)
    base = inner.number("rope_theta", settings.number("rope_theta", 10000.0))
    kind = values.get("rope_type") or values.get("type") or "default"
    kind = _NAMES.get(kind, kind)
    share = values.get("partial_rotary_factor") or settings.get("partial_rotary_factor", 1.0)
    fields: dict[str, Any] = {"rotary_base": float(base)}
    if share != 1:
        inner.problems.append(f"partial_rotary_factor={share!r}: all features turn here")
    if kind not in _KINDS:
        inner.problems.append(f"rope_type={kind!r}: meshdsl has {', '.join(_KINDS)}")
    elif kind != "default":
        fields |= {"rotary_scaling": kind, **_scaled(kind, settings, inner)}
    settings.problems += inner.problems
    return fields


def _scaled(kind: str, settings: Settings, inner: Settings) -> dict[str, Any]:
    """Returns the fields of a kind of scaling."""
    longest = settings.get("max_position_embeddings", 2048)
    original = inner.whole("original_max_position_embeddings", longest)
    original = settings.whole("original_max_position_embeddings", original)
    if kind == "dynamic":  # which scales from there, whatever else is said
        original = longest
    by_length = (longest / original,) if kind in ("yarn", "longrope") else ()
    fields: dict[str, Any] = {"rotary_factor": float(inner.number("factor", *by_length))}
    if kind != "linear":
        fields["rotary_original"] = original
    for name, field in _TURNS.get(kind, {}).items():
        default = (_DEFAULTS[name],) if name in _DEFAULTS else ()
        fields[field] = float(inner.number(name, *default))
    if kind == "longrope":
        fields["rotary_short"] = _numbers(inner, "short_factor")
        fields["rotary_long"] = _numbers(inner, "long_factor")
    if kind == "yarn":
        inner.only("truncate", True)
    if kind in ("yarn", "longrope"):
        fields["rotary_magnitude"] = _magnitude(kind, inner, fields["rotary_factor"])
    return fields


def _numbers(inner: Settings, name: str) -> tuple[float, ...]:
    value = inner.get(name)
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        inner.problems.append(f"{name}: needs a list of numbers, one for each pair of features")
        return ()
    return tuple(map(float, value))


def _magnitude(kind: str, inner: Settings, factor: float) -> float | None:
    """Returns what cosine and sine are multiplied by; None: what the paper says."""
    given = inner.number("attention_factor", None)
    if given is not None:
        return float(given)
    above, below = inner.number("mscale", 0), inner.number("mscale_all_dim", 0)
    if kind != "yarn" or not (above and below):
        return None
    slower = max(math.log(factor), 0.0)
    return (0.1 * above * slower + 1) / (0.1 * below * slower + 1)


def described_rotary(config: TransformerConfig) -> dict[str, Any]:
    """Returns the settings of rotary positions, which transformers 4 and 5 read."""
    kind, settings = config.rotary_scaling, {"rope_theta": config.rotary_base}
    if kind == "none":
        return settings
    scaling: dict[str, Any] = {"rope_type": kind, "factor": config.rotary_factor}
    if kind not in ("linear", "dynamic"):
        scaling["original_max_position_embeddings"] = config.rotary_original
    scaling |= {name: getattr(config, field) for name, field in _TURNS.get(kind, {}).items()}
    if kind == "longrope":
        scaling["short_factor"] = list(config.rotary_short)
        scaling["long_factor"] = list(config.rotary_long)
    if config.rotary_magnitude is not None:
        scaling["attention_factor"] = config.rotary_magnitude
    return {**settings, "rope_scaling": scaling}
