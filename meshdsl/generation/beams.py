"""Beam search: the likeliest texts that a model can write, as far as some beams see.

Every step extends each beam by its likeliest tokens and goes on with the best of all extensions.
The devices score; the host decides, in float64, so that all layouts decide alike up to ties.

Guarantees:
    A text scores log p(text) / tokens**length_penalty, its end token counted (Wu et al. 2016,
    "Google's neural machine translation system", section 7, with the simpler penalty of
    `transformers`).
    A search ends before the limit of tokens only when no beam can become better than the texts that
    have ended: `early_stopping="never"` of `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshdsl.generation.programs import BeamPrograms, Place
from meshdsl.generation.reading import check_prompts, read_prompts, settings, sizes_of
from meshdsl.generation.sampling import Sampling
from meshdsl.generation.texts import Text, prompt_tokens
from meshdsl.models.model import Model
from meshdsl.tensors.named_array import named
from meshdsl.training.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Hypothesis:
    """A text that a search has found.

    Attributes:
        tokens: those written, without the end token.
        log_probability: of all tokens, the end token included, in nats.
        score: what texts are compared by.
        ended: whether the end token ended it, and not the limit of tokens.
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    ended: bool


class Beams:
    """The beams of one text, from step to step.

    Args:
        beams: how many texts are kept.
        new_tokens: the most tokens of a text.
        length_penalty: above 0 prefers longer texts, below 0 shorter ones.
        end: the token that ends a text.

    Attributes:
        found: the best texts that have ended, best first, at most `beams`.
        done: whether the search is over.
    """

    def __init__(self, beams: int, new_tokens: int, length_penalty: float, end: int) -> None:
        self._beams, self._most = beams, new_tokens
        self._penalty, self._end = length_penalty, end
        self._texts: list[tuple[int, ...]] = [()]
        self._sums = np.zeros(1)
        self.found: list[Hypothesis] = []
        self.done = False

    def advance(self, scores: ArrayLike, tokens: ArrayLike) -> tuple[list[int], list[int]]:
        """Extends all beams by a token.

        Args:
            scores: [beams, ranked], log probabilities of tokens after each beam.
            tokens: [beams, ranked], those tokens.

        Returns:
            For each beam, the one that it goes on from, and its next token.
        """
        live = len(self._sums)
        sums = self._sums[:, None] + np.asarray(scores, np.float64)[:live]
        following = np.asarray(tokens)[:live]
        order = np.argsort(-sums, axis=None, kind="stable")[: 2 * self._beams]
        last = len(self._texts[0]) + 1 == self._most
        chosen: list[tuple[int, int, float]] = []
        for rank, at in enumerate(order):
            beam, column = divmod(int(at), sums.shape[1])
            total, token = float(sums[beam, column]), int(following[beam, column])
            if not np.isfinite(total):
                break
            if token == self._end or last:
                if rank < self._beams:
                    self._finish(self._texts[beam], token, total)
            elif len(chosen) < self._beams:
                chosen.append((beam, token, total))
        self._texts = [(*self._texts[beam], token) for beam, token, _ in chosen]
        self._sums = np.array([total for *_, total in chosen])
        self.done = not chosen or not self._can_improve()
        spare = self._beams - len(chosen)  # a small vocabulary may have fewer extensions
        return (
            [beam for beam, *_ in chosen] + [0] * spare,
            [token for _, token, _ in chosen] + [self._end] * spare,
        )

    def _finish(self, text: tuple[int, ...], token: int, total: float) -> None:
        ended = token == self._end
        score = total / (len(text) + 1) ** self._penalty
        tokens = text if ended else (*text, token)
        self.found.append(Hypothesis(tokens, total, score, ended))
        self.found.sort(key=lambda found: -found.score)
        del self.found[self._beams :]

    def _can_improve(self) -> bool:
        """Whether a text that begins with a beam may be better than the worst that is kept."""
        if len(self.found) < self._beams:
            return True
        length = self._most if self._penalty > 0 else len(self._texts[0]) + 1
        return self._sums[0] / length**self._penalty > self.found[-1].score


class Searcher:
    """Searches the likeliest texts of a model, with beams.

        searcher = Searcher(model, prompt_tokens=100, new_tokens=50, beams=4)
        searcher.load(params)
        (found,) = searcher.search([[72, 105]], end=0)
        print(found[0].tokens)

    Args:
        model: one with a `decoding`.
        prompt_tokens: the most tokens of a prompt.
        new_tokens: the most tokens that are written after it, the end token included.
        beams: how many texts are kept for each prompt.
        length_penalty: the power of the length that log probabilities are divided by.
        batch_size: how many prompts are searched at once; a batch has `beams` rows for each.
        place: where the programs run. Layouts that split `batch` by a divisor of `batch_size` keep
            the beams of a text together, so that choosing among them sends nothing.
        chunk: how many tokens of a prompt are read at once. None: up to 128.

    Raises:
        ValueError: there is no beam, the model writes no text, the texts are longer than its
            positions, or the layout does not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        prompt_tokens: int,
        new_tokens: int,
        beams: int = 4,
        length_penalty: float = 1.0,
        batch_size: int = 1,
        place: Place | None = None,
        chunk: int | None = None,
    ) -> None:
        if beams < 1:
            raise ValueError(f"a search needs at least one beam, not {beams}")
        self.beams, self.length_penalty, self.batch_size = beams, length_penalty, batch_size
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        sizes = sizes_of(model, prompt_tokens, new_tokens, batch_size * beams, chunk)
        self.programs = BeamPrograms(model, beams, sizes, place or Place())
        self._params: Any = None

    @property
    def start(self) -> int | None:
        """The token that a decoder begins with after a prompt that an encoder has read, if any."""
        return self.programs.start

    def load(self, params: Any) -> None:
        """Takes parameters to search with: a tree as the model's `init` returns; it is donated."""
        self._params = self.programs.prepared(params)

    def search(self, prompts: Sequence[Sequence[int]], end: int) -> list[list[Hypothesis]]:
        """Returns the texts found for each prompt, best first, at most `beams`.

        Args:
            prompts: the tokens of some prompts, up to `batch_size`, each at least one.
            end: the token that ends a text.

        Raises:
            ValueError: there are too many prompts, one is empty or too long, or the model's scores
                are not finite.
        """
        check_prompts(prompts, self.batch_size, self.prompt_tokens)
        if self._params is None:
            raise ValueError("the searcher has no parameters: load(params) first")
        texts = [Beams(self.beams, self.new_tokens, self.length_penalty, end) for _ in prompts]
        spare = self.batch_size - len(prompts)
        rows = [prompt for prompt in prompts for _ in range(self.beams)]
        rows += [prompts[0][-1:]] * (spare * self.beams)
        given = settings([Sampling(temperature=0)] * len(rows), [0] * len(rows))
        read, fixed = read_prompts(self.programs, self._params, rows, given)
        while True:
            parents, tokens = self._advance(texts, read)
            if all(text.done for text in texts):
                break
            state = read["state"]
            if not np.array_equal(parents, np.arange(len(rows)) % self.beams):
                state = self.programs.reorder(state, named(parents, ["batch"]))["state"]
            following = named(tokens[:, None], ["batch", "length"])
            read = self.programs.steps[1](self._params, state, fixed, following)
        for number, text in enumerate(texts):
            if not text.found:
                raise ValueError(f"the model's scores after prompt {number} are not finite")
        return [text.found for text in texts]

    def _advance(
        self, texts: Sequence[Beams], read: dict[str, Any]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the beam that each row goes on from, and its next token, both [batch]."""
        scores, tokens = np.asarray(read["scores"]), np.asarray(read["tokens"])
        parents = np.arange(len(scores), dtype=np.int32) % self.beams
        following = tokens[:, 0].astype(np.int32)
        for number, text in enumerate(texts):
            if not text.done:
                own = slice(number * self.beams, (number + 1) * self.beams)
                parents[own], following[own] = text.advance(scores[own], tokens[own])
        return parents, following


def search_texts(
    searcher: Searcher,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    stop: Sequence[str] = (),
    begin: int | None = None,
) -> Iterator[Text]:
    """Yields the best text that is found for each prompt, in order.

    Args:
        searcher: has parameters, and room for the prompts.
        stop: texts are cut before the first of these strings, after the search.
        begin: the token that prompts begin with; one that has it already gets no other.
    """
    tokens = prompt_tokens(tokenizer, prompts, searcher.start, begin)
    size = searcher.batch_size
    for first in range(0, len(prompts), size):
        batch = slice(first, first + size)
        found = searcher.search(tokens[batch], tokenizer.end)
        for prompt, (best, *_) in zip(prompts[batch], found, strict=True):
            text = Text(prompt, tokenizer, stop)
            for token in best.tokens:
                if text.finish is None:
                    text.add(token)
            if text.finish is None:
                text.close("end" if best.ended else "length")
            yield text
