"""The nearest names of tensors, for messages: fast also where a model has very many of them.

Names are compared without their numbers: `layers.7.q.weight` is near `layers.7.q_proj.weight` and
not near `layers.8.q.weight`, which is another tensor and no other spelling.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\d+")


class Nearest:
    """Finds the nearest of some names: `Nearest(names)("h.0.attn.c_atn.weight")`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        self._kinds: dict[str, str] = {}  # the names without numbers, with the first of each
        for name in self._names:
            self._kinds.setdefault(_NUMBER.sub("#", name), name)

    def __call__(self, name: str, cutoff: float = 0.7) -> list[str]:
        """Returns at most two names, those with the numbers of `name` where there are such."""
        kind, numbers = _NUMBER.sub("#", name), _NUMBER.findall(name)
        others = [other for other in self._kinds if other != kind]
        near = difflib.get_close_matches(kind, others, n=2, cutoff=cutoff)
        return [self._filled(other, numbers) for other in near]

    def _filled(self, kind: str, numbers: list[str]) -> str:
        if kind.count("#") == len(numbers):
            left = iter(numbers)
            name = re.sub("#", lambda _: next(left), kind)
            if name in self._names:
                return name
        return self._kinds[kind]
