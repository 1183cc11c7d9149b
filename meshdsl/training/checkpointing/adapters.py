"""Adapters merged into weights on the host: what a run with `with_lora` is exported as."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

FOLDER = "adapters/"  # of the paths of adapters
Fetch = Callable[[Sequence[str]], dict[str, np.ndarray]]


def merging(specs: Mapping[str, Any], fetch: Fetch) -> tuple[dict[str, Any], Fetch]:
    """Returns the parameters without adapters, and how to fetch them with the sums.

    Sums are made in float32 or wider, and rounded once. Parameters without adapters stay the same.

    Args:
        specs: the dims and dtypes of all parameters, by path.
        fetch: returns parameters by their paths.
    """
    own = {path: spec for path, spec in specs.items() if not path.startswith(FOLDER)}

    def merged(names: Sequence[str]) -> dict[str, np.ndarray]:
        pairs = {
            name: [f"{FOLDER}{name}/down", f"{FOLDER}{name}/up"]
            for name in names
            if f"{FOLDER}{name}/down" in specs
        }
        arrays = fetch([*names, *(path for pair in pairs.values() for path in pair)])
        for name, pair in pairs.items():
            down, up = (arrays.pop(path) for path in pair)
            labels = _labels([specs[path] for path in (*pair, name)])
            wide = np.promote_types(np.float32, np.asarray(arrays[name]).dtype)
            factors = np.asarray(down).astype(wide), np.asarray(up).astype(wide)
            added = np.einsum(factors[0], labels[0], factors[1], labels[1], labels[2])
            weight = np.asarray(arrays[name])
            arrays[name] = (weight.astype(wide) + added).astype(weight.dtype)
        return arrays

    return own, merged


def _labels(specs: Sequence[Any]) -> list[list[int]]:
    """Returns a number for each dim of each spec, the same for the same names, for `np.einsum`."""
    # It takes numbers below 52, which the names of a whole model may exceed.
    names = list(dict.fromkeys(name for spec in specs for name in spec.dims.names))
    return [[names.index(name) for name in spec.dims.names] for spec in specs]
