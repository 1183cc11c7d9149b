"""Continuous batching: texts join and leave the rows of a batch while others are written.

Guarantees:
    The tokens of a text are those that a `Writer` writes of it alone, up to rounding.
    Nothing is compiled after a `RowWriter` is made.
    A step begins before the host has seen the tokens of the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl import ops
from meshdsl.generation.probabilities import StepProbabilities, TokenProbability
from meshdsl.generation.programs import Place, Programs, Sizes
from meshdsl.generation.reading import check_prompts, check_writes, in_chunks, settings, sizes_of
from meshdsl.generation.sampling import FILTERS, Sampling
from meshdsl.models.model import Cache, Model
from meshdsl.tensors.named_array import NamedArray, named, spec
from meshdsl.tensors.tensor import Tensor


class RowPrograms(Programs):
    """The programs of a batch whose rows are texts that begin at different steps.

    All rows share the position of the step, `Cache.start`: a row's text begins after as many pads
    as make it end there. Slots hold the latest positions, so a text never outgrows them.

    Attributes:
        join: state, fixed, tokens [batch, length=1], the same of one text after its prompt, and the
            row, s32[] -> `state`, `fixed` and `tokens` with the text in that row.

    Args:
        most: the most positions that a text reads.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        place: Place,
        one: Programs,
        most: int,
        ranked: int = 0,
    ) -> None:
        self._most = most
        super().__init__(model, FILTERS, sizes, place, lengths=[1], ranked=ranked)
        tokens = [spec(each.sizes.tokens(1), "int32") for each in (self, one)]
        arguments = (self.state, self.fixed, tokens[0], one.state, one.fixed, tokens[1])
        row = spec([], "int32")
        # The tokens stay: the host reads those of a step after a later text has joined.
        self.join = place.compiled(self._join, [*arguments, row], ["state", "fixed"])

    def _step(
        self, params: Any, state: dict[str, Any], fixed: dict[str, Tensor], tokens: Tensor
    ) -> dict[str, Any]:
        # The rows of texts that have ended are read on, but stay in the model's positions.
        cache = state["cache"]
        pads = ops.maximum(cache.pads, cache.start - (self._most - 1))
        return super()._step(params, {**state, "cache": cache.replace(pads=pads)}, fixed, tokens)

    def _join(
        self,
        state: dict[str, Any],
        fixed: dict[str, Tensor],
        tokens: Tensor,
        text: dict[str, Any],
        text_fixed: dict[str, Tensor],
        text_tokens: Tensor,
        row: Tensor,
    ) -> dict[str, Any]:
        def placed(rows: Tensor, one: Tensor) -> Tensor:
            return ops.dynamic_update_slice(rows, one, "batch", row)

        cache, one = state["cache"], text["cache"]
        layers = {
            stack: {
                name: placed(rows, _rolled(one.layers[stack][name], self._start(cache) - one.start))
                for name, rows in tensors.items()
            }
            for stack, tensors in cache.layers.items()
        }
        start = self._start(cache)
        pads = placed(cache.pads + (start - cache.start), one.pads + (start - one.start))
        joined = cache.replace(start=start, pads=pads, layers=layers)
        if cache.memory is not None:
            memory = {name: placed(rows, one.memory[name]) for name, rows in cache.memory.items()}
            joined = joined.replace(
                memory=memory, memory_pads=placed(cache.memory_pads, one.memory_pads)
            )
        return {
            "state": {"cache": joined, "seen": placed(state["seen"], text["seen"])},
            "fixed": {name: placed(rows, text_fixed[name]) for name, rows in fixed.items()},
            "tokens": placed(tokens, text_tokens),
        }

    def _start(self, cache: Cache) -> Tensor:
        """Returns the position of the step, counted anew so that it never overflows.

        The slots of all positions stay, and all positions of texts are at least 0.
        """
        tensor = next(iter(next(iter(cache.layers.values())).values()))
        slots = tensor.shape.get("memory_length").size
        return cache.start % slots + -(-self._most // slots) * slots


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """Returns a tensor whose slots are moved on by a number, at least 0, around their end."""
    slots = x.shape.get("memory_length")
    source = (ops.arange(slots) + (slots.size - by % slots.size)) % slots.size
    return ops.transpose(ops.take_along(x, source, slots), x.shape.names)


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt, or the beginning of one, that a `RowWriter` has read for a text.

    Attributes:
        state, fixed: of a batch of this text.
        tokens: s32[batch=1, length=1]; the first one after the prompt, once all of it is read.
        probabilities: of that token, as of `Programs.steps`, if the text reports them.
        scored: of each chunk of the prompt, the token after each position and its probabilities, if
            they are asked for.
    """

    state: Any
    fixed: Any
    tokens: NamedArray
    probabilities: Any = None
    scored: tuple[tuple[NDArray[np.int32], Any], ...] = ()

    @property
    def first(self) -> int:
        """The first token after the prompt."""
        return int(np.asarray(self.tokens)[0, 0])

    def first_probability(self) -> TokenProbability:
        """Returns the probability of the first token after the prompt."""
        return StepProbabilities.of(self.tokens, self.probabilities).at(0)

    def prompt_probabilities(self, prompt: Sequence[int]) -> list[TokenProbability]:
        """Returns the probability of each token of the prompt, once all of it is read."""
        found = [StepProbabilities.of(targets, read) for targets, read in self.scored]
        all_ = [each.at(at) for each in found for at in range(len(each.tokens))]
        return [TokenProbability(int(prompt[0])), *all_[len(all_) - len(prompt) : -1]]


class RowWriter:
    """Writes texts in the rows of a batch, which texts join and leave one by one.

        writer = RowWriter(model, context=512, rows=4)
        writer.load(params)
        *_, prompt = writer.read([72, 105], Sampling(temperature=0.7))
        writer.join(prompt, row=2)
        print(prompt.first, np.asarray(writer.step())[2])

    A text leaves by another one that joins in its row, or by not being looked at any more.

    Args:
        model: one with a `decoding`.
        context: the most tokens of a prompt and its text together; of a model with an encoder, of
            each.
        rows: how many texts are written at once.
        place: where the programs run.
        chunk: how many tokens of a prompt are read at once. None: up to 128.
        ranked: of how many of the likeliest tokens a text may report the probabilities; 0: no text
            reports any.

    Attributes:
        probabilities: of the tokens of the latest step, as of `Programs.steps`.

    Raises:
        ValueError: the model writes no text, the context is longer than its positions, or the
            layout does not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        rows: int = 8,
        place: Place | None = None,
        chunk: int | None = None,
        ranked: int = 0,
    ) -> None:
        check_writes(model)
        assert model.decoding is not None
        most = model.decoding.max_length
        if most is not None and context > most:
            raise ValueError(
                f"{model.name} has learned max_length={most} positions, too few for a text of "
                f"{context} tokens"
            )
        self.context, self.rows = context, rows
        new = 0 if model.decoding.empty else context
        sizes, place = sizes_of(model, context, new, 1, chunk), place or Place()
        lengths = [sizes.chunk if model.decoding.empty else 1]
        reads = model.decoding.empty is not None
        self._one = Programs(model, FILTERS, sizes, place, lengths, ranked, reads)
        sizes = replace(sizes, batch=rows)
        self.programs = RowPrograms(model, sizes, place, self._one, context, ranked)
        self.ranked = ranked
        self.probabilities: Any = None
        self._params: Any = None
        self._state: Any = None
        self._fixed: Any = None
        self._tokens: Any = None

    @property
    def start(self) -> int | None:
        """The token that a decoder begins with after a prompt that an encoder has read, if any."""
        return self.programs.start

    def load(self, params: Any) -> None:
        """Takes parameters to write with: a tree as the model's `init` returns; it is donated."""
        self.take(self.programs.prepare(params)["params"])

    def take(self, prepared: Any) -> None:
        """Takes parameters that are prepared, as `LikelihoodScorer.params` of the same place."""
        self._params = prepared
        count, sizes = self.rows, self.programs.sizes
        rows = settings([Sampling()] * count, [0] * count, False if self.ranked else None)
        rows["read"] = named(np.zeros(count, np.int32), ["batch"])
        none = named(np.zeros(count, np.int32), ["batch"])
        source = None
        if self.programs.encodes:
            source = named(np.zeros((count, sizes.prompt), np.int32), ["batch", "length"])
        begun = self.programs.begin(self._params, source, none, rows)
        self._state, self._fixed = begun["state"], begun["fixed"]
        self._tokens = named(np.zeros((count, 1), np.int32), ["batch", "length"])

    def warm_up(self) -> None:
        """Runs every program once, so that no text waits for what happens at the first run."""
        if self.ranked and not self.programs.encodes:
            list(self.read([0], Sampling(), scored=True))
        (*_, prompt) = self.read([0], Sampling())
        self.join(prompt, 0)
        np.asarray(self.step())

    def room(self, prompt_tokens: int) -> int:
        """Returns the most tokens that are written after a prompt of some tokens."""
        return self.context if self.programs.encodes else self.context - prompt_tokens

    def read(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        number: int = 0,
        reports: bool = False,
        scored: bool = False,
    ) -> Iterator[ReadPrompt]:
        """Reads a prompt, and yields after each chunk of it; the last one is to `join`.

        Args:
            number: of the text, which its draws depend on, as does the seed of `sampling`.
            reports: whether the probabilities of the text's tokens are asked for.
            scored: whether those of the prompt's tokens are; an encoder's prompt has none.

        Raises:
            ValueError: the prompt is empty, or longer than the context; or the writer has no
                probabilities.
        """
        check_prompts([prompt], 1, self.context)
        if self._params is None:
            raise ValueError("the writer has no parameters: load(params) first")
        if (reports or scored) and not self.ranked:
            raise ValueError("the writer has no probabilities: make it with `ranked`")
        if scored and self.programs.encodes:
            raise ValueError("an encoder reads the prompt: its tokens have no probabilities")
        rows = settings([sampling], [number], reports if self.ranked else None)
        pieces: tuple[tuple[NDArray[np.int32], Any], ...] = ()
        for read in in_chunks(self._one, self._params, [prompt], rows, scored):
            if scored:
                pieces = (*pieces, (read["targets"], read["read"]))
            found = read.get("probabilities")
            yield ReadPrompt(read["state"], read["fixed"], read["tokens"], found, pieces)

    def join(self, prompt: ReadPrompt, row: int) -> None:
        """Has the following steps write the text after a prompt, in a row."""
        own, text = (self._state, self._fixed, self._tokens), (prompt.state, prompt.fixed)
        joined = self.programs.join(*own, *text, prompt.tokens, named(np.int32(row), []))
        self._state, self._fixed, self._tokens = (joined[n] for n in ("state", "fixed", "tokens"))

    def step(self) -> NamedArray:
        """Writes a token of each row; returns them, s32[batch, length=1], as soon as it begins."""
        stepped = self.programs.steps[1](self._params, self._state, self._fixed, self._tokens)
        self._state, self._tokens = stepped["state"], stepped["tokens"]
        self.probabilities = stepped.get("probabilities")
        return self._tokens
