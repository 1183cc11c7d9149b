"""Continuous batching: texts join and leave the rows of a batch while others are written.

Guarantees:
    The tokens of a text are those that a `Writer` writes of it alone, up to rounding.
    Nothing is compiled after a `RowWriter` is made.
    A step begins before the host has seen the tokens of the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.generation.paging import PAGE, PageTable
from meshdsl.generation.probabilities import StepProbabilities, TokenProbability
from meshdsl.generation.programs import Place, Programs
from meshdsl.generation.reading import check_prompts, check_writes, in_chunks, settings, sizes_of
from meshdsl.generation.rows import PagedRowPrograms, RowPrograms
from meshdsl.generation.sampling import FILTERS, Sampling
from meshdsl.models.model import Model
from meshdsl.tensors.named_array import NamedArray, named


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt, or the beginning of one, that a `RowWriter` has read for a text.

    Attributes:
        state, fixed: of a batch of this text.
        tokens: s32[batch=1, length=1]; the first one after the prompt, once all of it is read.
        probabilities: of that token, as of `Programs.steps`, if the text reports them.
        read: how many positions the cache has of it.
        scored: of each chunk of the prompt, the token after each position and its probabilities, if
            they are asked for.
    """

    state: Any
    fixed: Any
    tokens: NamedArray
    read: int
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

    A text leaves by `leave`, or by another one that joins in its row.

    With `cache_tokens` the texts share one cache, of which each has as much as its tokens need (see
    `nn.Pages`). Then a text may join once it `fits`, and where the next step is `lacking` pages,
    some text has to leave first; `read` can begin it again with what is `written`.

    Args:
        model: one with a `decoding`.
        context: the most tokens of a prompt and its text together; of a model with an encoder, of
            each.
        rows: how many texts are written at once.
        place: where the programs run.
        chunk: how many tokens of a prompt are read at once. None: up to 128.
        ranked: of how many of the likeliest tokens a text may report the probabilities; 0: no text
            reports any.
        cache_tokens: the tokens of all texts together that there is room for, rounded up to pages.
            None: each row has room for `context`.

    Attributes:
        table: which pages each row has; None: rows have caches of their own.
        probabilities: of the tokens of the latest step, as of `Programs.steps`.

    Raises:
        ValueError: the model writes no text, the context is longer than its positions, or the
            layout does not fit; or the cache has no room for one text, or the model takes no pages.
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
        cache_tokens: int | None = None,
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
        self.table: PageTable | None = None
        if cache_tokens is not None:
            if not model.decoding.paged:
                raise ValueError(
                    f"{model.name} takes no pages: its step is to have its slots from "
                    "`Cache.slots`, and its Decoding to say `paged=True`"
                )
            pages, window = -(-cache_tokens // PAGE), model.decoding.window
            self.table = PageTable(pages, rows, context, window, PAGE)
        self._one = Programs(model, FILTERS, sizes, place, lengths, ranked, reads)
        sizes = replace(sizes, batch=rows)
        given = model, sizes, place, self._one, context, ranked
        self.programs = (
            RowPrograms(*given)
            if self.table is None
            else PagedRowPrograms(*given, self.table.pages, self.table.page)
        )
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

    @property
    def cache_bytes(self) -> int:
        """How many bytes the caches of all rows have, on all devices together."""
        cache = self.programs.state["cache"]
        stacks = [*cache.layers.values(), *([cache.memory] if cache.memory else [])]
        specs = [each for stack in stacks for each in stack.values()]
        return sum(math.prod(d.size for d in s.dims) * s.dtype.itemsize for s in specs)

    def load(self, params: Any) -> None:
        """Takes parameters to write with: a tree as the model's `init` returns; it is donated."""
        self.take(self.programs.prepared(params))

    def take(self, prepared: Any) -> None:
        """Takes prepared parameters: of a place that unrolls nothing, `LikelihoodScorer.params`."""
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
        self.leave(0)

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
        written: Sequence[int] = (),
    ) -> Iterator[ReadPrompt]:
        """Reads a prompt, and yields after each chunk of it; the last one is to `join`.

        Args:
            number: of the text, which its draws depend on, as does the seed of `sampling`.
            reports: whether the probabilities of the text's tokens are asked for.
            scored: whether those of the prompt's tokens are; an encoder's prompt has none.
            written: the tokens of the text so far, if it was written before; they are read too.

        Raises:
            ValueError: the prompt is empty, or longer than the context; or the writer has no
                probabilities.
        """
        check_prompts([prompt], 1, self.context)
        if len(written) >= self.room(len(prompt)) > 0:
            raise ValueError(f"there is no room for a token after {len(written)} that are written")
        if self._params is None:
            raise ValueError("the writer has no parameters: load(params) first")
        if (reports or scored) and not self.ranked:
            raise ValueError("the writer has no probabilities: make it with `ranked`")
        if scored and self.programs.encodes:
            raise ValueError("an encoder reads the prompt: its tokens have no probabilities")
        rows = settings([sampling], [number], reports if self.ranked else None)
        pieces: tuple[tuple[NDArray[np.int32], Any], ...] = ()
        positions = self._positions(prompt, written)
        for read in in_chunks(self._one, self._params, [prompt], rows, scored, written):
            if scored:
                pieces = (*pieces, (read["targets"], read["read"]))
            found = read.get("probabilities")
            yield ReadPrompt(read["state"], read["fixed"], read["tokens"], positions, found, pieces)

    def fits(self, prompt: ReadPrompt) -> bool:
        """Whether there are pages for a text, and for one more of each text that is written."""
        return self.table is None or self.table.fits(prompt.read)

    def joining(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
        """Returns how many texts, in this order, there are pages for; rows are not counted.

        Args:
            texts: the prompt of each, and what is written of it.
        """
        if self.table is None:
            return len(texts)
        return self.table.joining(self._positions(*each) for each in texts)

    def _positions(self, prompt: Sequence[int], written: Sequence[int]) -> int:
        """Returns how many positions the cache has of a text that has been read."""
        return len(written) + (1 if self.programs.encodes else len(prompt))

    def join(self, prompt: ReadPrompt, row: int) -> None:
        """Has the following steps write the text after a prompt, in a row.

        Raises:
            ValueError: too few pages are free.
        """
        own, text = (self._state, self._fixed, self._tokens), (prompt.state, prompt.fixed)
        where = [named(np.int32(row), [])]
        if self.table is not None:
            where.append(named(self.table.join(row, prompt.read), ["page"]))
        joined = self.programs.join(*own, *text, prompt.tokens, *where)
        self._state, self._fixed, self._tokens = (joined[n] for n in ("state", "fixed", "tokens"))

    def leave(self, row: int) -> None:
        """Ends the text of a row: nobody looks at its tokens any more."""
        if self.table is not None:
            self.table.leave(row)

    @property
    def lacking(self) -> int:
        """How many pages are missing for the next step: texts have to leave first."""
        return 0 if self.table is None else self.table.lacking

    def step(self) -> NamedArray:
        """Writes a token of each row; returns them, s32[batch, length=1], as soon as it begins.

        Raises:
            ValueError: pages are `lacking`.
        """
        if self.table is not None:
            cache = self._state["cache"]
            pages = cache.pages.replace(next=named(self.table.step(), ["batch"]))
            self._state = {**self._state, "cache": cache.replace(pages=pages)}
        stepped = self.programs.steps[1](self._params, self._state, self._fixed, self._tokens)
        self._state, self._tokens = stepped["state"], stepped["tokens"]
        self.probabilities = stepped.get("probabilities")
        return self._tokens
