"""Dependencies: the results that an action needs, and the messages that carry results.

A result is `F`, `I` or `W` of a chunk and a microbatch (`Action.results`). Chunk c has these needs:

* `cF` needs `F` of chunk c-1. Chunk 0 reads the batch instead;
* `cI` needs `cF`, and `I` of chunk c+1. The last chunk reads the gradient of the loss instead;
* `cW` needs `cI`.
"""

from __future__ import annotations

from functools import lru_cache

from meshdsl.lowering.pipelines.actions import Action, Kind

Link = tuple[int, int]  # the stage that sends, and the stage that receives


@lru_cache(maxsize=1 << 16)  # Each rule calls this for each action.
def needs(action: Action, chunks: int) -> tuple[Action, ...]:
    """Returns the results that an action needs and does not compute itself, in order."""
    wanted = [need for result in action.results for need in _needs(result, chunks)]
    return tuple(need for need in dict.fromkeys(wanted) if need not in action.results)


def _needs(result: Action, chunks: int) -> list[Action]:
    chunk, microbatch = result.chunk, result.microbatch
    if result.kind == Kind.FORWARD:
        return [Action(Kind.FORWARD, chunk - 1, microbatch)] if chunk else []
    if result.kind == Kind.WEIGHTS:
        return [Action(Kind.INPUTS, chunk, microbatch)]
    own = [Action(Kind.FORWARD, chunk, microbatch)]
    return own + ([Action(Kind.INPUTS, chunk + 1, microbatch)] if chunk + 1 < chunks else [])


def link_of(result: Action, placement: tuple[int, ...]) -> Link | None:
    """Returns the link on which a result travels; None if no other stage needs the result.

    Args:
        result: an `F`, `I` or `W`. If its chunk does not exist, there is no link.
        placement: the stage of each chunk, as `Schedule.placement`.
    """
    step = {Kind.FORWARD: 1, Kind.INPUTS: -1}.get(result.kind)
    chunks = range(len(placement))
    if step is None or result.chunk not in chunks or result.chunk + step not in chunks:
        return None
    sender, receiver = placement[result.chunk], placement[result.chunk + step]
    return None if sender == receiver else (sender, receiver)


def send_of(result: Action) -> Action:
    """Returns the action that sends a result: `0SEND_F3` for `0F3`, `1SEND_B3` for `1I3`."""
    kind = Kind.SEND_F if result.kind == Kind.FORWARD else Kind.SEND_B
    return Action(kind, result.chunk, result.microbatch)


def receive_of(result: Action) -> Action:
    """Returns the action that receives a result: `1RECV_F3` for `0F3`, `0RECV_B3` for `1I3`."""
    if result.kind == Kind.FORWARD:
        return Action(Kind.RECV_F, result.chunk + 1, result.microbatch)
    return Action(Kind.RECV_B, result.chunk - 1, result.microbatch)


def carried(message: Action) -> Action:
    """Returns the result that a send or a receive carries."""
    kind = Kind.FORWARD if message.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.INPUTS
    step = {Kind.RECV_F: -1, Kind.RECV_B: 1}.get(message.kind, 0)
    return Action(kind, message.chunk + step, message.microbatch)
