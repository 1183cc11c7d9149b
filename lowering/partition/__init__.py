"""Partition rules, one file per family of operations, mirroring `meshdsl.ops`."""

from meshdsl.lowering.partition import (
    creation,
    einsum,
    elementwise,
    indexing,
    random,
    reduction,
    shape,
)
from meshdsl.lowering.partition.plan import Case, Plan, Rule

RULES: dict[str, Rule] = {
    **creation.RULES,
    **einsum.RULES,
    **elementwise.RULES,
    **indexing.RULES,
    **random.RULES,
    **reduction.RULES,
    **shape.RULES,
}

__all__ = ["RULES", "Case", "Plan", "Rule"]
