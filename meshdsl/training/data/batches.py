"""Batches of examples, shuffled by grain, cut into the parts of processes, and read ahead.

Guarantees:
    The order of examples is a function of the number of examples (and the weights of a mixture),
    the seed, the epoch and the position in it; batches do not depend on the number of processes or
    workers, nor on where a run was interrupted.
    Every epoch has each example once. Epochs follow without a gap: a batch may have the last
    examples of one and the first of the next.
    A state is a position in that order for all processes: any number of them can go on from it.
    Unless reading ahead is asked for, reading happens in the calling thread. No thread or process
    outlives an iterator that was closed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags
from numpy.typing import NDArray

from meshdsl.training.data.checks import check_at_least
from meshdsl.training.data.examples import Batch, Source
from meshdsl.training.data.mixtures import Mixture, Shares

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True)
class Part:
    """One of several processes that read: it gets consecutive rows of every batch.

    Raises:
        ValueError: there is no such process.
    """

    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        check_at_least(1, processes=self.processes)
        if not 0 <= self.process < self.processes:
            raise ValueError(f"process must be from 0 to {self.processes - 1}, got {self.process}")

    def rows(self, batch_size: int) -> slice:
        """Returns this process's rows of a batch; those of all processes cover it in order."""
        bounds = [batch_size * n // self.processes for n in (self.process, self.process + 1)]
        return slice(*bounds)


WHOLE = Part()


class Batches(Iterator[Batch]):
    """Batches without end, with a state that can be stored as JSON.

    Attributes:
        batch_size: examples in a batch of all processes.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int,
        part: Part,
        workers: int,
        ahead: int,
        check: Callable[[], None],
    ) -> None:
        self._source, self._seed = source, seed
        self._workers, self._ahead, self._check = workers, ahead, check
        self._rows = part.rows(batch_size)
        self.batch_size = batch_size
        self._order = _shuffled(source, seed)
        self._position = 0
        self._reader: Any = None

    def __next__(self) -> Batch:
        self._check()
        if self._reader is None:
            self._reader = iter(self._read())
        batch: Batch = next(self._reader)
        self._position += self.batch_size
        return batch

    def peek(self) -> Batch:
        """Reads and returns the next batch, without moving the position."""
        numbers = np.asarray(list(islice(self._rest(), self.batch_size)))
        return self._source[numbers[self._rows]]

    def resize(self, batch_size: int, rows: slice | None = None) -> None:
        """Changes the size of batches from the next one on.

        Args:
            batch_size: examples in a batch of all processes.
            rows: the rows of each batch that are read. None: all.

        Raises:
            ValueError: fewer examples than one batch.
        """
        _check_one_batch(self._source, batch_size)
        rows = slice(0, batch_size) if rows is None else rows
        if (batch_size, rows) != (self.batch_size, self._rows):
            self.close()
            self.batch_size, self._rows = batch_size, rows

    def state(self) -> dict[str, Any]:
        """Returns how many examples all processes have read, and what determines their order."""
        return {"position": self._position, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state, with any number of processes and with any batch size.

        Raises:
            ValueError: the state is of another order; all differences are listed.
        """
        problems = [
            f"{name} was {state.get(name)}, and is {value}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            problems.append(f"position must be a whole number of at least 0, got {position!r}")
        if problems:
            raise ValueError(
                "the data is not that of the stored state, so a run cannot go on in it: "
                + "; ".join(problems)
            )
        self.close()
        self._position = int(state["position"])

    def close(self) -> None:
        """Ends the threads and processes that read ahead; the next batch starts them again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"seed": self._seed, "examples": len(self._source)}
        if isinstance(self._source, Mixture):
            identity["weights"] = [str(weight) for weight in self._source.weights]
            identity["ends"] = self._source.ends.tolist()
        return identity

    def _rest(self) -> grain.MapDataset:
        return self._order[self._position :] if self._position else self._order

    def _read(self) -> grain.IterDataset:
        return _batches(
            self._source, self._rest(), self.batch_size, self._rows, self._workers, self._ahead
        )


@dataclass
class OrderedBatches(Iterable[Batch]):
    """Batches of chosen examples in their order; see `ordered_batches`.

    Attributes:
        numbers: the examples.
        batch_size: examples in a batch of all processes.
        rows: the rows of each batch that are read.
    """

    source: Source
    numbers: NDArray[np.int64]
    batch_size: int
    rows: slice

    def __iter__(self) -> Iterator[Batch]:
        import grain

        order = grain.MapDataset.source(self.numbers)
        return iter(_batches(self.source, order, self.batch_size, self.rows))

    def resize(self, batch_size: int, rows: slice | None = None) -> None:
        """Changes the size of batches; arguments as of `Batches.resize`."""
        self.batch_size, self.rows = batch_size, rows or slice(0, batch_size)


def shuffled_batches(
    source: Source,
    batch_size: int,
    seed: int,
    *,
    part: Part = WHOLE,
    workers: int = 0,
    ahead: int = 0,
    check: Callable[[], None] = lambda: None,
) -> Batches:
    """Returns batches without end: every epoch visits each example once, in an order of its own.

    In a `Mixture`, every source does so, and gives its share of the examples.

    Args:
        source: the examples; with workers, something that can be pickled.
        batch_size: examples in a batch of all processes.
        seed: the seed of the order.
        part: which rows of each batch are read; by default all.
        workers: the number of processes that read, batch by batch in turn; 0: this process reads.
            Each worker imports the script, so its work belongs below `if __name__ == "__main__":`.
        ahead: the number of batches that a thread or each worker reads ahead; 0: none. Workers
            read at least one ahead.
        check: a function that is called before each batch; its error ends the reading.

    Raises:
        ValueError: fewer examples than one batch, or a number out of range.
    """
    check_at_least(0, seed=seed, workers=workers, ahead=ahead)
    _check_one_batch(source, batch_size)
    return Batches(source, batch_size, seed, part, workers, ahead, check)


def ordered_batches(
    source: Source, batch_size: int, count: int | None = None, *, part: Part = WHOLE
) -> OrderedBatches:
    """Returns full batches in a fixed order, the same on every pass: for evaluation.

    Args:
        source: the examples; sources of a `Mixture` follow one another, whatever its weights.
        batch_size: examples in a batch; the last ones are left out if they do not fill a batch.
        count: at most this many batches, of examples spread evenly over the source. None: all.
        part: which rows of each batch are read; by default all.

    Raises:
        ValueError: fewer examples than one batch, or a number out of range.
    """
    _check_one_batch(source, batch_size)
    if count is None:
        rows = np.arange(len(source))
    else:
        check_at_least(1, count=count)
        used = min(count, len(source) // batch_size) * batch_size
        rows = np.arange(used) * len(source) // used
    return OrderedBatches(source, rows, batch_size, part.rows(batch_size))


def _shuffled(source: Source, seed: int) -> grain.MapDataset:
    """Returns the endless shuffled order: numbers of examples."""
    import grain  # with JAX behind it, the slowest import here: only for those who read data

    def endless(start: int, stop: int, seed: int) -> grain.MapDataset:
        return grain.MapDataset.range(start, stop).seed(seed).shuffle().repeat()

    if not isinstance(source, Mixture):
        return endless(0, len(source), seed)
    ends = source.ends
    orders = [
        endless(int(end) - len(inner), int(end), seed + number)
        for number, (inner, end) in enumerate(zip(source.sources, ends, strict=True))
    ]
    return grain.MapDataset.select_from_datasets(orders, Shares(source.weights))


@dataclass(frozen=True)
class _Pick:
    """Maps the numbers of a batch's examples to this process's rows of the batch."""

    source: Source
    rows: slice

    def __call__(self, numbers: np.ndarray) -> Batch:
        return self.source[numbers[self.rows]]


def _batches(
    source: Source,
    order: grain.MapDataset,
    batch_size: int,
    rows: slice,
    workers: int = 0,
    ahead: int = 0,
) -> grain.IterDataset:
    import grain

    pick = _Pick(source, rows)
    batches = order.batch(batch_size, drop_remainder=True).map(pick)
    threads = 1 if ahead and not workers else 0
    reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead * threads)
    result = batches.to_iter_dataset(reading)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads flags of its own when it starts workers
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(workers, per_worker_buffer_size=max(ahead, 1))
        result = result.mp_prefetch(options, worker_init_fn=_follow_parent)
    return result


def _follow_parent(worker: int, workers: int) -> None:
    """Makes a worker ignore Ctrl-C, which the training process handles, and end with that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _check_one_batch(source: Source, batch_size: int) -> None:
    check_at_least(1, batch_size=batch_size)
    if len(source) < batch_size:
        raise ValueError(
            f"batch_size={batch_size} needs at least {batch_size:,} examples, there are only "
            f"{len(source):,}"
        )
