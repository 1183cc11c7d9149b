"""Partition rules, one file per family of operations, mirroring `meshdsl.ops`."""

from meshdsl.lowering.partition import (
    convolution,
    creation,
    cumulative,
    debug,
    einsum,
    elementwise,
    fft,
    indexing,
    joining,
    linalg,
    local,
    pooling,
    random,
    reduction,
    shape,
    slicing,
    sorting,
)
from meshdsl.lowering.partition.attention import rules as attention
from meshdsl.lowering.partition.plan import Case, Plan, Rule

RULES: dict[str, Rule] = {
    **attention.RULES,
    **convolution.RULES,
    **creation.RULES,
    **debug.RULES,
    **cumulative.RULES,
    **einsum.RULES,
    **elementwise.RULES,
    **fft.RULES,
    **indexing.RULES,
    **joining.RULES,
    **linalg.RULES,
    **local.RULES,
    **pooling.RULES,
    **random.RULES,
    **reduction.RULES,
    **shape.RULES,
    **slicing.RULES,
    **sorting.RULES,
}

__all__ = ["RULES", "Case", "Plan", "Rule"]
