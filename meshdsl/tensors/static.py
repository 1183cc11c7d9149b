"""What a tree holds beside its arrays: functions, numbers, text.

Invariant: a `Static` is a node without leaves. So it is a part of a tree's structure: programs are
traced anew where it differs, and gradients and optimizers pass it on.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """A value in the structure of a tree.

    Attributes:
        value: compared with its type, as 1 is no True.
    """

    value: Hashable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self!r} is a part of a tree whose arrays have names; md.unnamed(tree) makes plain "
            "arrays of these, and a function of this"
        )

    @property
    def _key(self) -> tuple[type, Hashable]:
        return type(self.value), self.value


def without_static(tree: Any) -> Any:
    """Returns a tree with the values of its `Static` nodes in their places."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Static) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Static),
    )
