"""Partition rules, one file per family of operations, mirroring `meshdsl.ops`."""

from __future__ import annotations

from meshdsl.lowering.partition import (
    checkpoint,
    creation,
    cumulative,
    debug,
    elementwise,
    indexing,
    joining,
    literal,
    local,
    random_keys,
    reduction,
    regions,
    shape,
    slicing,
    sorting,
)
from meshdsl.lowering.partition.attention import rules as attention
from meshdsl.lowering.partition.products import (
    convolution,
    einsum,
    factorizations,
    fft,
    grouped,
    linalg,
    pooling,
)
from meshdsl.lowering.partition.strategy import Case, Rule, Strategies, Strategy, Work
from meshdsl.tracing.graph import Operation

FAMILIES = (
    attention,
    checkpoint,
    convolution,
    creation,
    cumulative,
    debug,
    einsum,
    elementwise,
    factorizations,
    fft,
    grouped,
    indexing,
    joining,
    linalg,
    literal,
    local,
    pooling,
    random_keys,
    reduction,
    regions,
    shape,
    slicing,
    sorting,
)
RULES: dict[str, Rule] = {name: rule for family in FAMILIES for name, rule in family.RULES.items()}

__all__ = ["FAMILIES", "RULES", "Case", "Rule", "Strategies", "Strategy", "Work", "rule_of"]


def rule_of(op: Operation) -> Rule:
    """Returns the partition rule of an operation: `rule_of(op)(Case(op, operands, results, mesh))`.

    Raises:
        ValueError: it has none; the message names the file to put it in.
    """
    if op.name not in RULES:
        where = "BODIES in lowering/writing/bodies.py needs it" if op.bodies else _place_for(op)
        raise ValueError(
            f"operation `{op.name}` has no partition rule, which {op.source} needs: {where} "
            "(ARCHITECTURE.md, How to add)"
        )
    return RULES[op.name]


def _place_for(op: Operation) -> str:
    """Returns what to add for an operation without a rule, and to which file.

    A file of rules has the name of the module in `meshdsl.ops` with the shape rules, or of its
    folder.
    """
    paths = [family.__name__.split(".")[1:] for family in FAMILIES]
    files = {path[-2] if path[-1] == "rules" else path[-1]: path for path in paths}
    parts = op.primitive.rule.__module__.split(".")
    for part in reversed(parts):
        if part in files:
            return f"add it to RULES in {'/'.join(files[part])}.py"
    folder = "products/" if "products" in parts else ""
    file = f"lowering/partition/{folder}{parts[-1]}.py"
    return f"add it to RULES in {file}, and the file to FAMILIES in lowering/partition/__init__.py"
