"""Partition rules, one file per family of operations, mirroring `meshdsl.ops`."""

from __future__ import annotations

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
from meshdsl.lowering.partition.strategy import Case, Rule, Strategies, Strategy, Work
from meshdsl.tracing.graph import Operation

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

__all__ = ["RULES", "Case", "Rule", "Strategies", "Strategy", "Work", "rule_of"]


def rule_of(op: Operation) -> Rule:
    """Returns the partition rule of an operation: `rule_of(op)(Case(op, operands, results, mesh))`.

    Raises:
        ValueError: it has none; the message names the file to put it in.
    """
    if op.name not in RULES:
        family = op.primitive.rule.__module__.rpartition(".")[2]
        where = "BODIES in lowering/writing/bodies.py needs it" if op.bodies else ""
        where = where or f"add it to RULES in lowering/partition/{family}.py"
        raise ValueError(
            f"operation `{op.name}` has no partition rule, which {op.source} needs: {where} "
            "(ARCHITECTURE.md, How to add)"
        )
    return RULES[op.name]
