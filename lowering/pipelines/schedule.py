"""Schedule: the table of a pipeline, one row of actions per stage.

A row is the order in which a stage acts. Stages do not share a clock: an action starts when the one
before it has ended and its operands are there. An empty cell (None) takes no time; it aligns
columns where stages do share a clock (`circular`), and it shows bubbles in other people's tables.

A schedule either has no sends, and each result that another stage needs travels by itself as soon
as it is computed, or it has all sends and receives (`messages.with_messages`).

Guarantees: a schedule is immutable. It may be wrong: `checking.check` says whether it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.lowering.pipelines.actions import RECEIVES, SENDS, Action

Row = tuple[Action | None, ...]
Place = tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """What each stage does, in which order.

    Attributes:
        rows: per stage its actions; None is an empty cell. The index in a row is the *column*.
        chunks: how many chunks the model has.
        microbatches: how many microbatches the batch has.
        name: what reports call it.
    """

    rows: tuple[Row, ...]
    chunks: int
    microbatches: int
    name: str = "schedule"

    @staticmethod
    def of(rows: Iterable[Sequence[Action | None]], name: str = "schedule") -> Schedule:
        """Returns the schedule of rows, with the chunks and microbatches that occur in them."""
        table = tuple(tuple(row) for row in rows)
        parts = [part for row in table for action in row if action for part in _parts(action)]
        chunks = 1 + max((part.chunk for part in parts), default=-1)
        microbatches = 1 + max((part.microbatch for part in parts), default=-1)
        return Schedule(table, chunks, microbatches, name)

    @property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return len(self.rows)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Per chunk, its stage: the one that has most of the chunk's computations.

        In a correct schedule it has all of them. A chunk without any is given to stage 0.
        """
        votes = [Counter[int]() for _ in range(self.chunks)]
        for stage, _, action in self.cells():
            for result in action.results:
                if result.chunk < self.chunks:
                    votes[result.chunk][stage] += 1
        return tuple(min(v, key=lambda s: (-v[s], s)) if v else 0 for v in votes)

    @cached_property
    def places(self) -> Mapping[Action, Place]:
        """Where each result and each message is: (stage, column), of several the first."""
        where: dict[Action, Place] = {}
        for stage, column, action in self.cells():
            for one in action.results or (action,):
                where.setdefault(one, (stage, column))
        return where

    @cached_property
    def rounds(self) -> int:
        """The most chunks that a stage has: how often a microbatch comes by."""
        return max(Counter(self.placement).values(), default=0)

    @cached_property
    def has_messages(self) -> bool:
        """Whether sends and receives are actions of the table."""
        return any(action.kind in SENDS | RECEIVES for _, _, action in self.cells())

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some `W` is apart from its `I`, so that a lowering needs both."""
        parts = (part for _, _, action in self.cells() for part in _parts(action))
        return any(part.kind in ("I", "W") for part in parts)

    def cells(self) -> Iterator[tuple[int, int, Action]]:
        """Yields (stage, column, action) of all cells that are not empty, row by row."""
        for stage, row in enumerate(self.rows):
            for column, action in enumerate(row):
                if action is not None:
                    yield stage, column, action

    def without_empty_cells(self) -> Schedule:
        """Returns an equal schedule whose rows have actions only."""
        return self._keep(lambda action: action is not None)

    def without_messages(self) -> Schedule:
        """Returns the schedule without sends and receives, which then happen by themselves."""
        return self._keep(lambda a: a is None or a.kind not in SENDS | RECEIVES)

    def _keep(self, wanted: Callable[[Action | None], bool]) -> Schedule:
        return replace(self, rows=tuple(tuple(filter(wanted, row)) for row in self.rows))


def _parts(action: Action) -> tuple[Action, ...]:
    return action.parts or (action,)
