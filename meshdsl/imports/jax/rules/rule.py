"""A rule: how a primitive's dims are inferred, and how it is converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshdsl.imports.jax.conversion import Convert
from meshdsl.imports.jax.inference import Infer


@dataclass(frozen=True)
class Rule:
    infer: Infer
    convert: Convert


Table = Mapping[str, Rule]
