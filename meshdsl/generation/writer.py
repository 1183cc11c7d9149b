"""Writer: a model that reads prompts and writes tokens.

Guarantees:
    A writer compiles its programs when it is made, for all prompts that fit it.
    The tokens of a text do not depend on the texts beside it, nor, up to rounding, on mesh, layout
    and backend.
    A step begins before the host has seen the tokens of the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.generation.programs import Place, Programs
from meshdsl.generation.reading import check_prompts, read_prompts, settings, sizes_of
from meshdsl.generation.sampling import Sampling
from meshdsl.models.model import Model


class Writer:
    """Writes tokens with a model.

        writer = Writer(model, prompt_tokens=100, new_tokens=50, batch_size=4)
        writer.load(params)
        for tokens in writer.write([[72, 105]]):
            print(tokens)

    Args:
        model: one with a `decoding`.
        prompt_tokens: the most tokens of a prompt.
        new_tokens: the most tokens that are written after it.
        batch_size: how many texts are written at once.
        sampling: how tokens are chosen.
        place: where the programs run.
        chunk: how many tokens of a prompt are read at once. None: up to 128.

    Raises:
        ValueError: the model writes no text, the texts are longer than its positions, or the layout
            does not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        prompt_tokens: int,
        new_tokens: int,
        batch_size: int = 1,
        sampling: Sampling | None = None,
        place: Place | None = None,
        chunk: int | None = None,
    ) -> None:
        self.sampling = sampling or Sampling()
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        self.sizes = sizes_of(model, prompt_tokens, new_tokens, batch_size, chunk)
        self.programs = Programs(model, self.sampling.filters, self.sizes, place or Place())
        self._params: Any = None

    @property
    def start(self) -> int | None:
        """The token that a decoder begins with after a prompt that an encoder has read, if any."""
        return self.programs.start

    def load(self, params: Any) -> None:
        """Takes parameters to write with: a tree as the model's `init` returns; it is donated."""
        self._params = self.programs.prepared(params)

    def write(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int] | None = None
    ) -> Iterator[NDArray[np.int32]]:
        """Yields the next token of each prompt, [texts], `new_tokens` times.

        Args:
            prompts: the tokens of some prompts, up to the batch size, each at least one.
            numbers: the number of each text, which its draws depend on; by default 0, 1, ...

        Raises:
            ValueError: there are too many prompts, or one is empty or too long.
        """
        check_prompts(prompts, self.sizes.batch, self.prompt_tokens)
        if self._params is None:
            raise ValueError("the writer has no parameters: load(params) first")
        count = len(prompts)
        numbers = range(count) if numbers is None else numbers
        spare = self.sizes.batch - count
        rows, numbers = [*prompts, *[prompts[0][-1:]] * spare], [*numbers, *[0] * spare]
        given = settings([self.sampling] * len(rows), numbers)
        read, fixed = read_prompts(self.programs, self._params, rows, given)
        state, following = read["state"], read["tokens"]
        for _ in range(self.new_tokens - 1):
            tokens = following
            stepped = self.programs.steps[1](self._params, state, fixed, tokens)
            state, following = stepped["state"], stepped["tokens"]
            yield np.asarray(tokens)[:count, 0]
        yield np.asarray(following)[:count, 0]
