"""Actions: the steps of a pipeline stage, in the notation of PyTorch's pipelining.

A *stage* is a position along the mesh axis of a pipeline. A *chunk* is a run of consecutive layers;
chunk 0 is first in the model. A *microbatch* is a part of the batch.

The text of an action has the number of its chunk, its kind, and the number of its microbatch. For
example, `0F3` is the forward pass of chunk 0 on microbatch 3. PyTorch uses the same text, but it
calls a chunk a stage, and a stage a rank.

| text | meaning |
|---|---|
| `0F3` | forward pass |
| `0I3` | backward pass: gradients of the chunk's inputs |
| `0W3` | backward pass: gradients of the chunk's weights |
| `0B3` | full backward pass: `0I3` and `0W3` together |
| `0SEND_F3`, `1RECV_F3` | chunk 0 sends its output, chunk 1 receives it |
| `1SEND_B3`, `0RECV_B3` | chunk 1 sends the gradient of its inputs, chunk 0 receives it |
| `(0F7;7B3)OVERLAP_F_B` | a forward and a backward pass side by side |
| `0UNSHARD`, `0RESHARD` | gather the chunk's weights, free the gathered weights |
| `0REDUCE_GRAD` | reduce the chunk's weight gradients over data parallelism |

Guarantees: `Action.parse(str(action)) == action`; actions are immutable and hashable.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property


class Kind(enum.StrEnum):
    """The kinds of actions. The values are PyTorch's names."""

    FORWARD = "F"
    INPUTS = "I"
    WEIGHTS = "W"
    BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP = "OVERLAP_F_B"


COMPUTATIONS = frozenset(
    {Kind.FORWARD, Kind.INPUTS, Kind.WEIGHTS, Kind.BACKWARD, Kind.OVERLAP},
)
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
MESSAGES = SENDS | RECEIVES
# These actions concern the weights of a chunk, so they have no microbatch.
OF_WEIGHTS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

_SINGLE = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_ABSENT = -1


@dataclass(frozen=True)
class Action:
    """An action of a stage: the content of one cell of a schedule.

    Attributes:
        kind: what the stage does.
        chunk: the number of its chunk in the model; -1 for an overlap.
        microbatch: the number of its microbatch; -1 for an overlap and for actions on weights.
        parts: the two actions of an overlap; empty for all other kinds.
    """

    kind: Kind
    chunk: int = _ABSENT
    microbatch: int = _ABSENT
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        if self.kind == Kind.OVERLAP:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        microbatch = "" if self.microbatch == _ABSENT else self.microbatch
        return f"{self.chunk}{self.kind.value}{microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Returns the action of a text such as `0F3` or `(0F7;7B3)OVERLAP_F_B`.

        Raises:
            ValueError: The text is not an action. The message says how to write one.
        """
        text = text.strip()
        if overlap := _OVERLAP.fullmatch(text):
            parts = tuple(_parse_single(part.strip(), text) for part in overlap[1].split(";"))
            return Action(Kind.OVERLAP, parts=parts)
        return _parse_single(text, text)

    @property
    def computes(self) -> bool:
        """Whether the action is a forward or backward pass. Only these take time of a stage."""
        return self.kind in COMPUTATIONS

    @property
    def singles(self) -> tuple[Action, ...]:
        """The parts of an overlap; else the action itself."""
        return self.parts or (self,)

    @cached_property
    def results(self) -> tuple[Action, ...]:
        """The results that the action computes, as `F`, `I` and `W`. `B` computes `I` and `W`."""
        if self.kind == Kind.OVERLAP:
            return tuple(result for part in self.parts for result in part.results)
        if self.kind == Kind.BACKWARD:
            kinds: tuple[Kind, ...] = (Kind.INPUTS, Kind.WEIGHTS)
        elif self.computes:
            kinds = (self.kind,)
        else:
            kinds = ()
        return tuple(Action(kind, self.chunk, self.microbatch) for kind in kinds)


def _parse_single(text: str, cell: str) -> Action:
    """Returns the action of a text that is not an overlap. Errors also quote the text of `cell`."""
    match = _SINGLE.fullmatch(text)
    within = "" if text == cell else f" in `{cell}`"
    if not match or match[2] not in set(Kind) - {Kind.OVERLAP}:
        if match and match[2] == "BW":
            raise ValueError(
                f"`{text}`{within}: `BW` is the notation of PyTorch before 2.6. Write `B` for a "
                "full backward pass (`BW` there), and `I` for the gradient of inputs (`B` there)"
            )
        raise ValueError(
            f"`{text}`{within} is not an action. Write the chunk, the kind and the microbatch, "
            "such as `0F3`, `2SEND_B0` or `(0F7;7B3)OVERLAP_F_B`; the kinds are "
            f"{', '.join(kind for kind in Kind if kind != Kind.OVERLAP)}"
        )
    kind, numbered = Kind(match[2]), bool(match[3])
    if numbered == (kind in OF_WEIGHTS):
        fix = (
            f"has no microbatch: write `{match[1]}{kind}`"
            if numbered
            else f"needs a microbatch: write `{match[1]}{kind}0` for the first one"
        )
        raise ValueError(f"`{text}`{within}: {kind} {fix}")
    return Action(kind, int(match[1]), int(match[3]) if numbered else _ABSENT)


def forward(chunk: int, microbatch: int) -> Action:
    """Returns `F`, as in `forward(0, 3)`: `0F3`."""
    return Action(Kind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """Returns `B`: the full backward pass."""
    return Action(Kind.BACKWARD, chunk, microbatch)


def inputs(chunk: int, microbatch: int) -> Action:
    """Returns `I`: the gradients of a chunk's inputs."""
    return Action(Kind.INPUTS, chunk, microbatch)


def weights(chunk: int, microbatch: int) -> Action:
    """Returns `W`: the gradients of a chunk's weights."""
    return Action(Kind.WEIGHTS, chunk, microbatch)
