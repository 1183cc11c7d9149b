"""Loops: how often the loops of an optimised HLO module run their bodies.

XLA says so in `known_trip_count`; XLA:TPU does not. Then it is read off the counter: the start, the
step in the body, and the limit in the condition.
"""

from __future__ import annotations

import re

from meshdsl.lowering.backends.hlo.text import Line, Module


def trips(module: Module, computation: str, loop: Line) -> int:
    """Returns how often a `while` of a computation runs its body.

    Raises:
        ValueError: it does not count in a way that is known.
    """
    known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes)
    if known:
        return int(known.group(1))
    (condition,), (body,) = loop.named("condition"), loop.named("body")
    root = module.roots[condition]
    if root.op == "compare" and "direction=LT" in root.attributes:
        counter, limit = root.operands
        index = _index(module, condition, counter)
        (start,) = loop.operands
        if index is not None:
            first = _number(module, computation, _element(module, computation, start, index))
            step = _step(module, body, index)
            last = _number(module, condition, limit)
            if last is None and (carried := _index(module, condition, limit)) is not None:
                last = _number(module, computation, _element(module, computation, start, carried))
            if first is not None and last is not None and step:
                return max(0, -(-(last - first) // step))
    raise ValueError(f"how often {loop.name} runs is not known: {root.op}({root.arguments})")


def _number(module: Module, computation: str, name: str | None) -> int | None:
    """Returns the value of a constant; None: it is none."""
    line = module.plain(computation, name)
    return int(line.arguments) if line is not None and line.op == "constant" else None


def _index(module: Module, computation: str, name: str) -> int | None:
    """Returns which element of the loop's state a value is."""
    line = module.plain(computation, name)
    if line is None or line.op != "get-tuple-element":
        return None
    match = re.search(r"index=(\d+)", line.attributes)
    assert match is not None
    return int(match.group(1))


def _element(module: Module, computation: str, name: str, index: int) -> str | None:
    """Returns the name of an element of a tuple."""
    line = module.computations[computation].get(name)
    return line.operands[index] if line is not None and line.op == "tuple" else None


def _step(module: Module, body: str, index: int) -> int | None:
    """Returns what a loop's body adds to an element of its state."""
    line = module.plain(body, module.roots[body].operands[index])
    if line is None or line.op != "add":
        return None
    numbers = [_number(module, body, operand) for operand in line.operands]
    return next((number for number in numbers if number is not None), None)
