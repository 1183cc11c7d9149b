"""Writer: a model that reads prompts and writes tokens.

Guarantees:
    A writer compiles its programs when it is made, for all prompts that fit it.
    The tokens of a text do not depend on the texts beside it, nor, up to rounding, on mesh, layout
    and backend.
    A step begins before the host has seen the tokens of the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.generation.programs import ROWS, Place, Programs, Sizes
from meshdsl.generation.sampling import Sampling
from meshdsl.models.model import Model
from meshdsl.ops import random
from meshdsl.tensors.named_array import NamedArray, named

_CHUNK = 128  # the most tokens of a prompt that are read at once, by default
_TOKENS = ["batch", "length"]


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
        check_writes(model)
        check_lengths(model, prompt_tokens, new_tokens)
        assert model.decoding is not None
        self._encodes = model.decoding.empty is None
        self.sampling = sampling or Sampling()
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        read = max(1, prompt_tokens - self._encodes)  # the decoder reads the last token itself
        chunk = chunk or min(_CHUNK, 1 << (read - 1).bit_length())
        self.sizes = Sizes(batch_size, -(-read // chunk) * chunk, new_tokens, chunk)
        self.programs = Programs(model, self.sampling, self.sizes, place or Place())
        self._params: Any = None

    def load(self, params: Any) -> None:
        """Takes parameters to write with: a tree as the model's `init` returns; it is donated."""
        self._params = self.programs.prepare(params)["params"]

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
        self._check(prompts)
        if self._params is None:
            raise ValueError("the writer has no parameters: load(params) first")
        count = len(prompts)
        numbers = range(count) if numbers is None else numbers
        spare = self.sizes.batch - count
        rows, numbers = [*prompts, *[prompts[0][-1:]] * spare], [*numbers, *[0] * spare]
        following, state, fixed = self._read(rows, numbers)
        for _ in range(self.new_tokens - 1):
            tokens = following
            stepped = self.programs.steps[1](self._params, state, fixed, tokens)
            state, following = stepped["state"], stepped["tokens"]
            yield np.asarray(tokens)[:count, 0]
        yield np.asarray(following)[:count, 0]

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        if not 1 <= len(prompts) <= self.sizes.batch:
            raise ValueError(
                f"the writer takes 1 to {self.sizes.batch} prompts, got {len(prompts)}"
            )
        for number, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.prompt_tokens:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens; the writer takes 1 to "
                    f"{self.prompt_tokens}"
                )

    def _read(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> tuple[NamedArray, Any, Any]:
        """Reads prompts; returns the tokens that follow, [batch, length=1], state and the rest."""
        sizes, programs = self.sizes, self.programs
        if self._encodes:
            source, pads = _aligned_right(prompts, sizes.prompt + 1)
            text, source = source[:, -1:], source[:, :-1]
        else:
            longest = max(map(len, prompts))
            text, pads = _aligned_right(prompts, -(-longest // sizes.chunk) * sizes.chunk)
            source = None
        rows: dict[str, Any] = {
            name: named(np.full(sizes.batch, getattr(self.sampling, name), dtype), ["batch"])
            for name, dtype in ROWS.items()
            if name != "number"
        }
        texts = np.array([number % 2**32 for number in numbers], np.uint32)
        rows |= {"number": named(texts, ["batch"]), "key": random.key(self.sampling.seed)}
        rows |= {"width": named(np.int32(text.shape[1]), [])}
        given = None if source is None else named(source, _TOKENS)
        begun = programs.begin(self._params, given, named(pads, ["batch"]), rows)
        state, fixed, read = begun["state"], begun["fixed"], None
        size = min(sizes.chunk, text.shape[1])
        for first in range(0, text.shape[1], size):
            piece = named(text[:, first : first + size], _TOKENS)
            read = programs.steps[size](self._params, state, fixed, piece)
            state = read["state"]
        assert read is not None
        return read["tokens"], state, fixed


def _aligned_right(
    prompts: Sequence[Sequence[int]], width: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns prompts that end at the last of `width` positions, and the number of pads of each."""
    text = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(text, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return text, np.array([width - len(prompt) for prompt in prompts], np.int32)


def check_writes(model: Model) -> None:
    """Checks that a model writes text.

    Raises:
        ValueError: it does not, or does not say how many tokens there are.
    """
    if model.decoding is None:
        raise ValueError(
            f"{model.name} does not write text: decoder-only transformers and T5 do, and a Model "
            "of your own with a `decoding`"
        )
    if not hasattr(model.config, "vocab"):
        raise ValueError(
            f"{model.name} does not say how many tokens there are: give its Model a `config` with "
            "`vocab`"
        )


def limits(model: Model) -> tuple[int | None, Callable[[int], int | None]]:
    """Returns the most tokens of a prompt, and a function from its tokens to the most after it.

    The positions that a model has learned limit them. None: any number.
    """
    assert model.decoding is not None
    most = model.decoding.max_length
    if most is None:
        return None, lambda prompt: None
    if model.decoding.empty is None:  # encoder and decoder have positions of their own
        return most + 1, lambda prompt: most
    return most, lambda prompt: most + 1 - prompt  # the last token is not read


def check_lengths(model: Model, prompt_tokens: int, new_tokens: int) -> None:
    """Checks that texts fit the positions that a model has learned.

    Raises:
        ValueError: they do not.
    """
    assert model.decoding is not None
    most, new = limits(model)
    room = new(prompt_tokens)
    if most is not None and room is not None and (prompt_tokens > most or new_tokens > room):
        raise ValueError(
            f"{model.name} has learned max_length={model.decoding.max_length} positions, too few "
            f"for a prompt of {prompt_tokens} tokens and {new_tokens} new ones"
        )
