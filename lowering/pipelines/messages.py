"""Messages: adds sends and receives to a schedule, at positions where they cost no time."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.lowering.pipelines.actions import Action
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.dependencies import link_of, receive_of, send_of
from meshdsl.lowering.pipelines.planning import plan
from meshdsl.lowering.pipelines.schedule import Schedule


def with_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns the schedule with sends and receives, and without empty cells.

    A stage sends each result that another stage needs as soon as it has computed it. The receive is
    in the row of the other stage, before the computation that this stage does at that time. A
    receive only starts the transfer, as in PyTorch. The message travels during that computation.
    The action that needs the message waits for it. So sends and receives cost no time.

    All actions have a common order in which each receive directly follows its send. So the schedule
    has no deadlock, even if a send blocks until the other stage receives. And each stage receives
    the messages of another stage in the order of their sends.

    Args:
        schedule: a correct schedule without messages.
        costs: the times of the actions, which decide their order. By default F = I = W, and B takes
            twice that time.

    Raises:
        ValueError: The schedule is incorrect, or has messages, or a computation takes no time.
    """
    if schedule.has_messages:
        raise ValueError(
            f"schedule `{schedule.name}` has sends and receives. Call `without_messages()` first "
            "to place them again"
        )
    spans = [span for row in plan(schedule, costs).spans for span in row]
    if instant := next((span for span in spans if span.start == span.end), None):
        raise ValueError(
            f"`{instant.action}` of schedule `{schedule.name}` takes no time, so the order of "
            "messages is not known: give costs above 0"
        )
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for span in sorted(spans, key=lambda span: (span.end, span.stage)):
        rows[span.stage].append(span.action)
        for result in span.action.results:
            if link := link_of(result, schedule.placement):
                sender, receiver = link
                rows[sender].append(send_of(result))
                rows[receiver].append(receive_of(result))
    return replace(schedule, rows=tuple(map(tuple, rows)))
