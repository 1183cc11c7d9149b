"""Scores: the loss of a trained model on text.

Guarantees:
    Every example counts once, also those that do not fill a batch. The loss is the mean over tokens
    and does not depend on the batch size, mesh or layout, up to rounding.
    Losses of training that are not about text, such as those of routers, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.generation.programs import Place
from meshdsl.models.model import Model, learned_in, packed_batch
from meshdsl.precision.rewriting import with_precision
from meshdsl.precision.rules import Precision
from meshdsl.running.jit import Compiled
from meshdsl.tensors.named_array import NamedArray, Spec, named
from meshdsl.training.data.examples import Batch, Source
from meshdsl.training.programs import places
from meshdsl.training.state import spec_of

_AHEAD = 2  # batches that may wait for the device
_ROUTERS = ("balance_weight", "router_z_weight")


@dataclass(frozen=True)
class Score:
    """The loss of a model on some text.

    Attributes:
        loss: nats per token.
        examples: how many windows or packed rows.
        tokens: how many of their tokens count.
    """

    loss: float
    examples: int
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinity where that is beyond floating-point numbers."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits(self) -> float:
        """The loss in bits per token."""
        return self.loss / math.log(2)


class Scorer:
    """Scores text with a model.

        scorer = Scorer(model, batch_size=16, length=128)
        scorer.load(params)
        print(scorer.score(windows).perplexity)

    Args:
        model: takes batches of tokens and targets.
        packed: whether examples are packed documents.
        masked: whether they say which tokens are learned; only these count.
        precision: dtypes of products, as in `md.with_precision`.
        place: where the programs run.

    Raises:
        ValueError: the layout or the mesh do not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int,
        length: int,
        packed: bool = False,
        masked: bool = False,
        precision: Precision | str | None = None,
        place: Place | None = None,
    ) -> None:
        self.model, self.batch_size, self.length = _of_text(model), batch_size, length
        spec_of_batch = packed_batch if packed else model.batch_spec
        self._spec_of_batch = spec_of_batch
        if masked:
            self._spec_of_batch = lambda *sizes: learned_in(spec_of_batch(*sizes))
        self._precision, self._place = precision, place or Place()
        self.like: Any = spec_of(self.model.init)
        self._programs = {batch_size: self._compiled(batch_size)}
        self._put = self._place.program(lambda params: {"params": params}, [self.like], "params")
        self._params: Any = None

    def places(self) -> list[Any]:
        """Returns the shardings of the parameters that `load` takes, without pads."""
        return places(self._put, self.like)

    def load(self, params: Any) -> None:
        """Takes parameters to score with: a tree as the model's `init` returns; it is donated."""
        self._params = self._put(params)["params"]

    def score(
        self,
        source: Source,
        examples: Sequence[int] | NDArray[np.integer] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Score:
        """Returns the score of examples; by default, of all in the source.

        Args:
            on_progress: is called with the number of examples of each batch that is scored.

        Raises:
            ValueError: there is no example.
        """
        numbers = np.arange(len(source)) if examples is None else np.asarray(examples)
        if not len(numbers):
            raise ValueError(f"the text is too short for one example of {self.length} tokens")
        total, counted = 0.0, 0
        for loss, count, rows in self._losses(source, numbers):
            total += loss * count
            counted += count
            if on_progress is not None:
                on_progress(rows)
        return Score(total / max(1, counted), len(numbers), counted)

    def _losses(self, source: Source, numbers: NDArray) -> Iterator[tuple[float, int, int]]:
        """Yields the mean loss of each batch, how many tokens count in it, and its examples."""
        waiting: list[tuple[NamedArray, int, int]] = []
        for first in range(0, len(numbers), self.batch_size):
            batch = source[numbers[first : first + self.batch_size]]
            rows = len(next(iter(batch.values())))
            if rows not in self._programs:  # the last batch is smaller
                self._programs[rows] = self._compiled(rows)
            loss = self._programs[rows](self._params, self._named(batch))
            waiting.append((loss, _counted(batch), rows))
            if len(waiting) > _AHEAD:
                loss, count, examples = waiting.pop(0)
                yield float(loss), count, examples
        yield from ((float(loss), count, examples) for loss, count, examples in waiting)

    def _named(self, batch: Batch) -> dict[str, NamedArray]:
        names = self._specs(1)
        return {name: named(array, names[name].dims.names) for name, array in batch.items()}

    def _specs(self, rows: int) -> Mapping[str, Spec]:
        return self._spec_of_batch(rows, self.length)

    def _compiled(self, rows: int) -> Compiled:
        loss_of = self.model.loss
        if self._precision is not None:
            loss_of = with_precision(loss_of, self._precision)

        def loss(params: Any, batch: Mapping[str, Any]) -> Any:
            value = loss_of(params, batch)
            return value[0] if isinstance(value, tuple) else value

        return self._place.program(loss, [self.like, dict(self._specs(rows))], main=True)


def _of_text(model: Model) -> Model:
    """Returns a model whose loss is that of text alone, without those of routers."""
    if getattr(model.config, "experts", 0):
        return model.with_overrides(",".join(f"{name}=0" for name in _ROUTERS))
    return model


def _counted(batch: Batch) -> int:
    """Returns how many tokens of a batch count."""
    if "learned" in batch:
        return int(np.sum(batch["learned"]))
    if "segments" in batch:
        return int(np.sum(batch["segments"] > 0))
    return int(batch["targets"].size)
