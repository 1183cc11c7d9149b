"""Rules of schedules with messages: a stage sends and receives each of them, in order."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.lowering.pipelines.actions import MESSAGES, SENDS, Action
from meshdsl.lowering.pipelines.checks.faults import Fault
from meshdsl.lowering.pipelines.dependencies import (
    Link,
    carried,
    link_of,
    needs,
    receive_of,
    send_of,
)
from meshdsl.lowering.pipelines.schedule import Schedule


def messages_are_needed(schedule: Schedule) -> Iterator[Fault]:
    """Another stage needs the result that a message carries."""
    for stage, column, action in schedule.cells():
        if action.kind in MESSAGES and not link_of(carried(action), schedule.placement):
            why = "no other stage sends or needs it"
            fix = "Remove it: a message goes to the next or previous chunk, on another stage"
            yield Fault(stage, column, action, why, fix)


def messages_are_sent_and_received(schedule: Schedule) -> Iterator[Fault]:
    """Each result for another stage has a send behind its computation, a receive before its use."""
    where, placement = schedule.places, schedule.placement
    for stage, column, action in schedule.cells():
        for result in action.results:
            if not link_of(result, placement):
                continue
            send = send_of(result)
            if send not in where:
                why, fix = "it is missing", f"Add it behind `{action}`, which computes `{result}`"
                yield Fault(stage, column + 1, send, why, fix)
            elif where[result] != (stage, column):
                continue  # it is computed twice, which another rule reports
            elif where[send][0] == stage and where[send][1] < column:
                why = f"it sends `{result}`, which is in column {column + 1}"
                yield Fault(*where[send], send, why, f"Move it behind `{action}`")
        for need in needs(action, schedule.chunks):
            link = link_of(need, placement)
            if not link or link[1] != stage:
                continue
            receive = receive_of(need)
            if receive not in where:
                why, fix = "it is missing", f"Add it before `{action}`, which needs `{need}`"
                yield Fault(stage, column, receive, why, fix)
            elif where[receive][0] == stage and where[receive][1] > column:
                why = f"it needs `{receive}`, which is in column {where[receive][1] + 1}"
                yield Fault(stage, column, action, why, f"Move `{receive}` before it")


def messages_are_received_in_order(schedule: Schedule) -> Iterator[Fault]:
    """A stage receives the messages of another stage in the order of their sends.

    Libraries such as NCCL match the sends and receives of two devices by their order.
    """
    for (sender, _), sent, received in _links(schedule):
        for expected, result in zip(sent, received, strict=True):
            if result != expected:
                receive = receive_of(result)
                why = f"stage {sender} sends `{send_of(expected)}` to this stage before"
                fix = f"Receive it here: `{receive_of(expected)}`"
                yield Fault(*schedule.places[receive], receive, why, fix)
                break


def _links(schedule: Schedule) -> Iterator[tuple[Link, list[Action], list[Action]]]:
    """Yields each link with the results that one stage sends and the other one receives, in order.

    Results without a send or without a receive are omitted, because other rules report them.
    """
    sent: dict[Link, list[Action]] = {}
    received: dict[Link, list[Action]] = {}
    places = sorted(schedule.places.items(), key=lambda item: item[1])
    for action, (stage, _) in places:
        if action.kind not in MESSAGES:
            continue
        result = carried(action)
        if link := link_of(result, schedule.placement):
            sender, receiver = link
            results, home = (sent, sender) if action.kind in SENDS else (received, receiver)
            if stage == home:
                results.setdefault(link, []).append(result)
    for link in received:
        ours, theirs = sent.get(link, []), received[link]
        both = set(ours) & set(theirs)
        yield link, [r for r in ours if r in both], [r for r in theirs if r in both]
