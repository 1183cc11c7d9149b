"""Stages of a lowering as text, each as it is reviewed: `meshdsl explain --stage=planned`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from meshdsl.layouts.placement import Placement
from meshdsl.lowering.costs.units import show_bytes, show_flops
from meshdsl.lowering.partition import Case, Strategies, Strategy, Work
from meshdsl.lowering.partition.attention.rules import readers
from meshdsl.lowering.partition.products.einsum import every_strategy
from meshdsl.lowering.placement.identity import names_of
from meshdsl.lowering.placement.placing import blocks_of
from meshdsl.lowering.stages import Placed, Planned, Reduced
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tracing.graph import Operation

if TYPE_CHECKING:
    from meshdsl.lowering.lower import Stages


def show_stage(stages: Stages, name: str) -> str:
    """Returns one stage of a lowering as text.

        print(show_stage(step.stages(x), "planned"))

    Args:
        name: one of `STAGES`; `passes` is the program as it runs.

    Raises:
        ValueError: there is no such stage.
    """
    if name not in STAGES:
        known = ", ".join(STAGES)
        raise ValueError(f"no stage {name!r}; stages are {known}{did_you_mean(name, list(STAGES))}")
    return STAGES[name](stages)


def _simplified(stages: Stages) -> str:
    return str(stages.simplified.graph)


def _placed(stages: Stages) -> str:
    """One line for each tensor: its name and its layout."""
    placed: Placed = stages.placed
    names = names_of(placed.graph)
    inside = {name: placed.layouts[t] for t, name in names.items() if t not in placed.constant}
    return str(Placement(tensors=inside))


def _planned(stages: Stages) -> str:
    """Every operation with its strategy, marked `*`, and those that were not taken."""
    planned: Planned = stages.planned
    names = names_of(planned.graph)
    lines = []
    for block in blocks_of(planned.graph):
        alike = readers(block)
        for op in block.operations:
            if op in planned.strategies and op.outputs and op.outputs[0] not in planned.constant:
                lines += [names[op.outputs[0]], *_strategies(planned, op, alike.get(op, 1))]
    return "\n".join(lines)


def _strategies(planned: Planned, op: Operation, times: int) -> list[str]:
    layouts, chooser = planned.layouts, planned.chooser
    operands = [layouts[tensor] for tensor in op.inputs]
    results = [layouts[tensor] for tensor in op.outputs]
    taken = _flow(planned.strategies[op])
    offered = chooser.offered(op, operands, results, times)
    if not isinstance(offered, Strategies) and _flow(offered) == taken:
        sends = chooser.sends(op, operands, results)
        return [f"  * {taken}" + (f"   {_costs(Work(sends))}" if sends else "")]
    flows = _flows(offered) if isinstance(offered, Strategies) else []
    if not isinstance(offered, Strategies) or taken not in flows:
        # The product has chosen together with others, beside what its tensors agree on.
        offered = every_strategy(Case(op, tuple(operands), tuple(results), chooser.mesh))
        flows = _flows(offered)
    cheapest = chooser.cheapest(offered.work)
    chosen = cheapest if flows[cheapest] == taken else flows.index(taken)
    return [
        f"  {'*' if number == chosen else ' '} {flow}   {_costs(work)}"
        for number, (flow, work) in enumerate(zip(flows, offered.work, strict=True))
    ]


def _flows(offered: Strategies) -> list[str]:
    return [_flow(offered.strategy(number)) for number in range(len(offered.work))]


def _flow(strategy: Strategy) -> str:
    before = " , ".join(map(str, strategy.operands)) or "nothing"
    return f"{before} -> {' , '.join(map(str, strategy.results))}"


def _costs(work: Work) -> str:
    sends = f"sends {show_bytes(work.sends)}"
    return sends + (f", computes {show_flops(work.flops)}" if work.flops else "")


def _reduced(stages: Stages) -> str:
    """What leaves a partial sum, and what stays one."""
    reduced: Reduced = stages.reduced
    planned = reduced.planned
    made = {
        tensor: layout.partial_axes
        for op, strategy in planned.strategies.items()
        for tensor, layout in zip(op.outputs, strategy.results, strict=True)
    }
    lines = []
    for tensor, name in names_of(planned.graph).items():
        if tensor in reduced.partial:
            lines.append(f"{name}  stays partial over {', '.join(sorted(reduced.partial[tensor]))}")
        elif made.get(tensor):
            lines.append(f"{name}  is made partial over {', '.join(made[tensor])}")
    return "\n".join(lines) or "no partial sums"


def _written(stages: Stages) -> str:
    return str(stages.written.program)


def _passes(stages: Stages) -> str:
    return str(stages.program)


STAGES: Mapping[str, Callable[[Stages], str]] = MappingProxyType(
    {
        "simplified": _simplified,
        "placed": _placed,
        "planned": _planned,
        "reduced": _reduced,
        "written": _written,
        "passes": _passes,
    }
)
