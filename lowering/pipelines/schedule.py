"""Schedule: the table of a pipeline, with one row of actions per stage.

A row has the actions of a stage in order. Stages do not share a clock. An action starts when the
action before it has finished and its operands have arrived. An empty cell (None) takes no time.
`circular` uses empty cells to align its ticks in columns. CSV files of others use them to show
bubbles.

There are two kinds of schedules. One kind has all sends and receives (`messages.with_messages`).
The other kind has none: a stage sends each result as soon as it has computed it.

Guarantees: a schedule is immutable. It may be incorrect; `checking.check` reports that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.lowering.pipelines.actions import MESSAGES, Action

Row = tuple[Action | None, ...]
Place = tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """The actions of each stage, in order.

    Attributes:
        rows: the actions of each stage; None is an empty cell. The index in a row is the *column*.
        chunks: the number of chunks of the model.
        microbatches: the number of microbatches of the batch.
        name: the name of the schedule in reports.
    """

    rows: tuple[Row, ...]
    chunks: int
    microbatches: int
    name: str = "schedule"

    @staticmethod
    def of(rows: Iterable[Sequence[Action | None]], name: str = "schedule") -> Schedule:
        """Returns the schedule of rows; counts the chunks and microbatches that occur in them."""
        table = tuple(tuple(row) for row in rows)
        actions = [single for row in table for action in row if action for single in action.singles]
        chunks = 1 + max((action.chunk for action in actions), default=-1)
        microbatches = 1 + max((action.microbatch for action in actions), default=-1)
        return Schedule(table, chunks, microbatches, name)

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return len(self.rows)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The stage of each chunk: the stage with the most computations of the chunk.

        In a correct schedule, this stage has all of them. A chunk without computations is on
        stage 0.
        """
        votes = [Counter[int]() for _ in range(self.chunks)]
        for stage, _, action in self.cells():
            for result in action.results:
                if result.chunk < self.chunks:
                    votes[result.chunk][stage] += 1
        return tuple(min(v, key=lambda s: (-v[s], s)) if v else 0 for v in votes)

    @cached_property
    def places(self) -> Mapping[Action, Place]:
        """The cell (stage, column) of each result and message; if there are several, the first."""
        where: dict[Action, Place] = {}
        for stage, column, action in self.cells():
            for one in action.results or (action,):
                where.setdefault(one, (stage, column))
        return where

    @cached_property
    def rounds(self) -> int:
        """The largest number of chunks of a stage: a microbatch visits the stage so often."""
        return max(Counter(self.placement).values(), default=0)

    @cached_property
    def has_messages(self) -> bool:
        """Whether the table contains sends and receives."""
        return any(action.kind in MESSAGES for _, _, action in self.cells())

    def cells(self) -> Iterator[tuple[int, int, Action]]:
        """Yields (stage, column, action) of each cell that is not empty, row by row."""
        for stage, row in enumerate(self.rows):
            for column, action in enumerate(row):
                if action is not None:
                    yield stage, column, action

    def without_empty_cells(self) -> Schedule:
        """Returns the schedule without its empty cells."""
        return self._keep(lambda action: action is not None)

    def without_messages(self) -> Schedule:
        """Returns the schedule without sends and receives; stages then send results at once."""
        return self._keep(lambda action: action is None or action.kind not in MESSAGES)

    def _keep(self, wanted: Callable[[Action | None], bool]) -> Schedule:
        return replace(self, rows=tuple(tuple(filter(wanted, row)) for row in self.rows))
