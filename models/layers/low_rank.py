"""Low-rank adapters: what training adds to a weight is a product of two thin matrices.

Hu et al. 2022, "LoRA", section 4.1. The sum is made where a block is computed, so that no more than
one layer of it is there at a time.
"""

from __future__ import annotations

from typing import Any

import jax

import meshdsl as md


class LowRank(md.Module):
    """A weight with its adapter; it stands in the place of the weight."""

    weight: md.Tensor  # layers, embed, heads, kv
    down: md.Tensor  # layers, embed, adapter
    up: md.Tensor  # layers, adapter, heads, kv

    def merged(self) -> md.Tensor:
        """Returns the sum of the weight and its adapter."""
        added = md.einsum(self.down, self.up, over="adapter")
        return self.weight + added.transpose(self.weight.shape.names)


def resolved(params: Any) -> Any:
    """Returns parameters with the sum in the place of each weight that has an adapter."""
    return jax.tree.map(
        lambda leaf: leaf.merged() if isinstance(leaf, LowRank) else leaf,
        params,
        is_leaf=lambda node: isinstance(node, LowRank),
    )
