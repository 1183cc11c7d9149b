"""Rules of schedules with messages: a stage sends and receives each of them, in order."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.lowering.pipelines.actions import SENDS, Action
from meshdsl.lowering.pipelines.checks.faults import Fault
from meshdsl.lowering.pipelines.checks.rules import is_message
from meshdsl.lowering.pipelines.dependencies import (
    carried,
    needs,
    receive_of,
    receiver,
    send_of,
)
from meshdsl.lowering.pipelines.schedule import Place, Schedule


def messages_are_needed(schedule: Schedule) -> Iterator[Fault]:
    """Another stage needs the result that a message carries."""
    for stage, column, action in schedule.cells():
        if is_message(action) and not _travels(carried(action), schedule):
            why = "no other stage is at the other end"
            fix = "Remove it: a result goes to the next chunk, and only if it is on another stage"
            yield Fault(stage, column, action, why, fix)


def _travels(result: Action, schedule: Schedule) -> bool:
    exists = 0 <= result.chunk < schedule.chunks
    return exists and receiver(result, schedule.placement) is not None


def messages_are_sent_and_received(schedule: Schedule) -> Iterator[Fault]:
    """Each result for another stage has a send behind its computation, a receive before its use."""
    where, placement = schedule.places, schedule.placement
    for stage, column, action in schedule.cells():
        for result in action.results:
            if not (0 <= result.chunk < schedule.chunks and receiver(result, placement)):
                continue
            send = send_of(result)
            if send not in where:
                why, fix = "it is missing", f"Add it behind `{action}`, which computes `{result}`"
                yield Fault(stage, column + 1, send, why, fix)
            elif where[send][0] == stage and where[send][1] < column:
                why = f"it sends `{result}`, which is in column {column}"
                yield Fault(*where[send], send, why, f"Move it behind `{action}`")
        for need in needs(action, schedule.chunks):
            target = receiver(need, placement)
            if not target or target[1] != stage:
                continue
            receive = receive_of(need)
            if receive not in where:
                why, fix = "it is missing", f"Add it before `{action}`, which needs `{need}`"
                yield Fault(stage, column, receive, why, fix)
            elif where[receive][0] == stage and where[receive][1] > column:
                why = f"it needs `{receive}`, which is in column {where[receive][1]}"
                yield Fault(stage, column, action, why, f"Move `{receive}` before it")


def messages_are_received_in_order(schedule: Schedule) -> Iterator[Fault]:
    """A stage receives the messages of another stage in the order of their sends.

    Libraries such as NCCL match the sends and receives of two devices by their order.
    """
    for link, sent, received in _links(schedule):
        for expected, result in zip(sent, received, strict=True):
            if result != expected:
                receive = receive_of(result)
                why = f"stage {link[0]} sends `{send_of(expected)}` to this stage before"
                fix = f"Receive it here: `{receive_of(expected)}`"
                yield Fault(*schedule.places[receive], receive, why, fix)
                break


def _links(schedule: Schedule) -> Iterator[tuple[Place, list[Action], list[Action]]]:
    """Yields each link with the results that one stage sends and the other one receives, in order.

    Results without a send or without a receive are omitted, because other rules report them.
    """
    sent: dict[Place, list[Action]] = {}
    received: dict[Place, list[Action]] = {}
    places = sorted(schedule.places.items(), key=lambda item: item[1])
    for action, (stage, _) in places:
        if is_message(action) and _travels(result := carried(action), schedule):
            target = receiver(result, schedule.placement)
            assert target
            link = (schedule.placement[result.chunk], target[1])
            ends = (sent, link[0]) if action.kind in SENDS else (received, link[1])
            if stage == ends[1]:
                ends[0].setdefault(link, []).append(result)
    for link, results in received.items():
        both = set(results) & set(sent.get(link, []))
        yield link, [r for r in sent.get(link, []) if r in both], [r for r in results if r in both]
