"""Paths: short names for the leaves of trees."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Sequence


def path_names(paths: Sequence[str]) -> list[str]:
    """Returns a short, unique name for each path: its last part, with earlier ones if needed.

    A parameter (a path with a part `params`, but not what an optimizer keeps of it) need only
    differ from the other parameters.
    """
    alike: dict[str, list[list[str]]] = collections.defaultdict(list)
    split = [re.sub(r"[^\w/]", "_", path).split("/") for path in paths]
    for parts in split:
        alike[parts[-1]].append(parts)
    return [".".join(_shortest(parts, alike[parts[-1]])) for parts in split]


def _is_parameter(parts: Sequence[str]) -> bool:
    return "params" in parts and "optimizer" not in parts


def _shortest(parts: list[str], alike: list[list[str]]) -> Sequence[str]:
    """Returns the fewest parts that distinguish a path from others with the same last part."""
    rivals = [other for other in alike if other is not parts]
    if _is_parameter(parts):
        rivals = [other for other in rivals if _is_parameter(other)]
    parents = range(len(parts) - 2, -1, -1)
    for count in range(len(parts)):
        for chosen in itertools.combinations(parents, count):
            words = {parts[i] for i in chosen}
            if not any(words <= set(other[:-1]) for other in rivals):
                return [*(parts[i] for i in sorted(chosen)), parts[-1]]
    return parts
