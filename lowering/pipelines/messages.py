"""Messages: the sends and receives of a schedule, where they cost no time."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.lowering.pipelines.actions import Action
from meshdsl.lowering.pipelines.dependencies import receive_of, receiver, send_of
from meshdsl.lowering.pipelines.planning import Costs, plan
from meshdsl.lowering.pipelines.schedule import Schedule


def with_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns the schedule with sends and receives, and without empty cells.

    Each result that another stage needs is sent as soon as it is computed. The stage that needs it
    receives it before the action that it is at by then. A receive is meant to begin and not to
    wait, as in PyTorch: the message travels beside that action, and what needs it waits for it.
    So sends and receives take no time that the schedule without them does not take.

    All actions have an order in which each receive follows its send at once. This makes the
    schedule right for every kind of message: there is no deadlock even if a send blocks until it is
    received, and the messages of two stages are received in the order in which they are sent.

    Args:
        schedule: a correct schedule without messages.
        costs: the times by which to say what ends when; by default F = I = W, and B twice that.

    Raises:
        ValueError: The schedule is wrong, or has messages, or a computation takes no time.
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
            if target := receiver(result, schedule.placement):
                rows[span.stage].append(send_of(result))
                rows[target[1]].append(receive_of(result))
    return replace(schedule, rows=tuple(map(tuple, rows)))
