"""Choices: what a user of the page chooses, and which choices are the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshdsl.layouts.layout import Layout


@dataclass(frozen=True)
class Choice:
    """The flags that differ between the plans of a page.

    Attributes:
        mesh, layout: as texts that `Mesh.parse` and `Layout.parse` read.
        remat: what the backward pass computes again; "": what the other flags say.
    """

    mesh: str
    layout: str
    microbatches: int = 1
    remat: str = ""

    @cached_property
    def key(self) -> tuple[str, str, int, str]:
        """What choices of the same plan have in common."""
        return self.mesh, canonical(self.layout), self.microbatches, self.remat

    def flags(self) -> list[str]:
        """Returns the flags as arguments of a command."""
        mesh = self.mesh.replace(" ", ",")
        return [f"--mesh_shape={mesh}", f"--layout={self.layout}", *self.flags_of_step()]

    def flags_of_step(self) -> list[str]:
        """Returns the flags of the step itself, whatever its mesh and layout."""
        found = [f"--microbatches={self.microbatches}"] if self.microbatches > 1 else []
        return found + ([f"--remat={self.remat}"] if self.remat else [])


def canonical(layout: str) -> str:
    """Returns one text of all layouts that mean the same.

    The order of rules matters among optional ones only. `dim:-` without a scope says nothing.

    >>> canonical("heads:model; length:model?; batch:data; embed:-")
    'batch:data; heads:model; length:model?'
    """
    rules = Layout.parse(layout).rules
    plain = sorted(str(rule) for rule in rules if not rule.optional and (rule.scope or rule.axes))
    return "; ".join([*plain, *(str(rule) for rule in rules if rule.optional)])
