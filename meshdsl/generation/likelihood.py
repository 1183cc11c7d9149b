"""Likelihoods: how likely a model finds texts after other texts, token by token.

Guarantees:
    A likelihood does not depend on the texts beside it, nor, up to rounding, on the batch size, the
    mesh and the layout.
    Texts are read in widths that are powers of two, so few programs are compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl import nn, ops
from meshdsl.generation.programs import Place, result_spec
from meshdsl.generation.reading import aligned_right, check_writes, splits_prompts
from meshdsl.layouts.validate import LayoutWarning
from meshdsl.lowering.program import SpmdProgram
from meshdsl.models.model import Cache, Model
from meshdsl.running.jit import Compiled
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.named_array import NamedArray, Spec, named, spec
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.programs import places
from meshdsl.training.state import spec_of

_CHUNK = 128  # the most tokens that are read at once, by default
_NARROWEST = 16  # the fewest positions of a program
_AHEAD = 2  # batches that may wait for the device
_TOKENS = ["batch", "length"]


@dataclass(frozen=True)
class Likelihood:
    """How likely a text is after another one.

    Attributes:
        tokens: the logarithm of the probability of each token, in nats: f64[tokens].
        likeliest: whether each of them is the likeliest token there: bool[tokens].
        left_out: how many tokens at the start of the text before it did not fit.
    """

    tokens: NDArray[np.float64]
    likeliest: NDArray[np.bool_]
    left_out: int = 0

    @property
    def total(self) -> float:
        """The logarithm of the probability of the text."""
        return float(self.tokens.sum())

    @property
    def greedy(self) -> bool:
        """Whether the model writes this text if it takes the likeliest token each time."""
        return bool(self.likeliest.all())


@dataclass(frozen=True)
class _Row:
    """What one text has the programs read.

    Attributes:
        number: of the text.
        source: what an encoder reads.
        text: what is read token by token.
        wanted: the tokens whose likelihood is asked for; they follow the last ones of `text`.
    """

    number: int
    source: Sequence[int]
    text: Sequence[int]
    wanted: Sequence[int]
    left_out: int

    def widths(self, narrowest: int, widest: int) -> tuple[int, int]:
        """Returns the positions that its programs have, of an encoder and of the text."""
        source, text = (1 << (len(each) - 1).bit_length() for each in (self.source, self.text))
        return max(source, narrowest), min(max(text, narrowest), widest)


class LikelihoodScorer:
    """Says how likely texts are after other texts.

        scorer = LikelihoodScorer(model, length=512, batch_size=8)
        scorer.load(params)
        (likelihood,) = scorer.score([([72, 105], [33, 33])])
        print(likelihood.total, likelihood.greedy)

    Args:
        model: one with a `decoding`.
        length: the most tokens that are read of a text and the one before it; of a model with an
            encoder, of each.
        batch_size: how many texts are read at once.
        place: where the programs run.
        chunk: how many tokens are read at once, a power of two. None: up to 128.

    Raises:
        ValueError: the model writes no text, the length is above its positions, or the layout does
            not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        length: int,
        batch_size: int = 8,
        place: Place | None = None,
        chunk: int | None = None,
    ) -> None:
        check_writes(model)
        assert model.decoding is not None
        most = model.decoding.max_length
        if most is not None and length > most:
            raise ValueError(
                f"{model.name} has learned max_length={most} positions, too few for a text of "
                f"{length} tokens"
            )
        self.model, self.length, self.batch_size = model, length, batch_size
        self._decoding, self._place = model.decoding, place or Place()
        self._encodes, self._splits = model.decoding.empty is None, splits_prompts(model)
        self._chunk = chunk or _CHUNK
        self._widest = -(-length // self._chunk) * self._chunk
        self.like: Any = spec_of(model.init)
        self._prepare = self._place.compiled(self._prepared, [self.like], "params")
        self._params_like = result_spec(self._prepared, self.like)["params"]
        self._programs: dict[tuple[str, int, int], Compiled] = {}
        first = min(_NARROWEST, self._chunk)  # the layout is checked before parameters are read
        self._lowered("score", first if self._encodes else 0, first)
        self._params: Any = None

    def places(self) -> list[Any]:
        """Returns the shardings of the parameters that `load` takes, without pads."""
        return places(self._prepare, self.like)

    def load(self, params: Any) -> None:
        """Takes parameters to score with: a tree as the model's `init` returns; it is donated."""
        self._params = self._prepare(params)["params"]

    @property
    def params(self) -> Any:
        """The parameters as steps read them; see `Decoding.prepare`."""
        return self._params

    def score(
        self,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        show: Callable[[int], None] | None = None,
    ) -> list[Likelihood]:
        """Returns the likelihood of each text after the one before it.

        Args:
            texts: pairs of the tokens before a text, at least one, and those of the text. Where
                they are too long together, the first tokens before the text are left out.
            show: gets the number of texts that are done, whenever some are.

        Raises:
            ValueError: nothing is before a text, or a text alone is too long; all are listed.
        """
        if self._params is None:
            raise ValueError("the scorer has no parameters: load(params) first")
        self._check(texts)
        found: dict[int, Likelihood] = {}
        rows = []
        for number, (before, text) in enumerate(texts):
            if text:
                rows.append(self._row(number, before, text))
            else:
                found[number] = Likelihood(np.zeros(0), np.zeros(0, bool))
        # The longest first: the memory suffices from the first batch on, or never.
        rows.sort(key=lambda row: (len(row.source), len(row.text)), reverse=True)
        waiting: list[_Waiting] = []
        for first in range(0, len(rows), self.batch_size):
            waiting.append(self._read(rows[first : first + self.batch_size]))
            if len(waiting) > _AHEAD:
                found.update(waiting.pop(0).likelihoods())
                if show is not None:
                    show(len(found))
        for each in waiting:
            found.update(each.likelihoods())
        if show is not None:
            show(len(found))
        return [found[number] for number in range(len(texts))]

    def _check(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        problems = []
        for number, (before, text) in enumerate(texts):
            if not before:
                problems.append(f"text {number} follows nothing: give it a token to begin after")
            if len(text) > self.length:
                problems.append(
                    f"text {number} has {len(text):,} tokens; the scorer takes {self.length:,}: "
                    "split it, or give more `length`"
                )
        if problems:
            raise ValueError("\n  ".join(["some texts cannot be scored:", *problems[:10]]))

    def _row(self, number: int, before: Sequence[int], text: Sequence[int]) -> _Row:
        if not self._encodes:
            left_out = max(0, len(before) + len(text) - 1 - self.length)
            return _Row(number, [], [*before[left_out:], *text[:-1]], text, left_out)
        left_out = max(0, len(before) - self.length - self._splits)
        before = before[left_out:]
        if self._splits:
            source, first = before[:-1], before[-1]
        else:
            assert self._decoding.start is not None
            source, first = before, self._decoding.start
        return _Row(number, source, [first, *text[:-1]], text, left_out)

    def _read(self, rows: Sequence[_Row]) -> _Waiting:
        """Begins to read rows; returns what is then known of them."""
        widths = [row.widths(min(_NARROWEST, self._chunk), self._widest) for row in rows]
        source_width, width = (max(each) for each in zip(*widths, strict=True))
        source_width *= self._encodes
        chunk = min(self._chunk, width)
        padded = [*rows, *[rows[-1]] * (self.batch_size - len(rows))]
        read = -(-max(len(row.text) for row in rows) // chunk) * chunk
        text, targets, pads = self._aligned(padded, read)
        source = None
        if self._encodes:
            sources, pads = aligned_right([row.source for row in padded], source_width)
            source = named(sources, _TOKENS)
        state = self._program("begin", source_width, width)(
            self._params, source, named(pads, ["batch"])
        )
        pieces = []
        for first in range(0, read, chunk):
            piece, wanted = (each[:, first : first + chunk] for each in (text, targets))
            given = [self._params, state["cache"], named(piece, _TOKENS)]
            if (wanted >= 0).any():
                given.append(named(np.maximum(wanted, 0), _TOKENS))
                state = self._program("score", source_width, width)(*given)
                pieces.append((wanted, state["losses"], state["likeliest"]))
            else:
                state = self._program("read", source_width, width)(*given)
        return _Waiting(rows, pieces)

    def _aligned(
        self, rows: Sequence[_Row], width: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Returns texts, the token after each position or -1 where none is wanted, and pads.

        Texts end at the last position, those of a decoder that follows an encoder begin at the
        first: it has no pads.
        """
        text, pads = aligned_right([row.text for row in rows], width)
        targets = np.full_like(text, -1)
        for target, row in zip(targets, rows, strict=True):
            target[width - len(row.wanted) :] = row.wanted
        if self._encodes:
            for at, count in enumerate(pads):
                text[at], targets[at] = np.roll(text[at], -count), np.roll(targets[at], -count)
        return text, targets, pads

    def _program(self, kind: str, source_width: int, width: int) -> Compiled:
        key = (kind, source_width, width)
        if key not in self._programs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LayoutWarning)  # the first one has warned
                self._programs[key] = self._lowered(*key).compile()
        return self._programs[key]

    def _lowered(self, kind: str, source_width: int, width: int) -> SpmdProgram:
        """Lowers a program: to begin a cache, to read tokens, or to score them too."""
        params, batch = self._params_like, Dimension("batch", self.batch_size)

        def tokens(length: int) -> Spec:
            return spec([batch, Dimension("length", length)], "int32")

        source = tokens(source_width) if self._encodes else None
        begin = partial(self._begin, width)
        arguments = [params, source, spec([batch], "int32")]
        if kind == "begin":
            return self._place.lowered(begin, arguments)
        cache = result_spec(begin, *arguments)["cache"]
        piece = tokens(min(self._chunk, width))
        if kind == "read":
            return self._place.lowered(self._read_tokens, [params, cache, piece], "cache")
        arguments = [params, cache, piece, piece]
        return self._place.lowered(self._score_tokens, arguments, "cache", main=True)

    def _prepared(self, params: Any) -> dict[str, Any]:
        return {"params": self._decoding.prepare(params)}

    def _begin(
        self, width: int, params: Any, source: Tensor | None, pads: Tensor
    ) -> dict[str, Cache]:
        decoding, chunk = self._decoding, min(self._chunk, width)
        room = nn.slots_needed(width, decoding.window, chunk)
        if decoding.empty is not None:
            return {"cache": decoding.empty(pads, room)}
        assert decoding.encode is not None and source is not None
        return {"cache": decoding.encode(params, source, pads, room)}

    def _read_tokens(self, params: Any, cache: Cache, tokens: Tensor) -> dict[str, Any]:
        return {"cache": self._decoding.step(params, tokens, cache)[1]}

    def _score_tokens(
        self, params: Any, cache: Cache, tokens: Tensor, targets: Tensor
    ) -> dict[str, Any]:
        scores, cache = self._decoding.step(params, tokens, cache, every=True)
        losses = nn.softmax_cross_entropy(scores, targets, over="vocab")
        likeliest = ops.argmax(scores, "vocab") == targets
        return {"cache": cache, "losses": losses, "likeliest": likeliest}


@dataclass(frozen=True)
class _Waiting:
    """What the device is to say of rows: of each chunk, what is wanted, losses and likeliest."""

    rows: Sequence[_Row]
    pieces: Sequence[tuple[NDArray[np.int32], NamedArray, NamedArray]]

    def likelihoods(self) -> dict[int, Likelihood]:
        """Returns the likelihood of each text, by its number."""
        wanted, losses, likeliest = (
            np.concatenate([np.asarray(piece[part]) for piece in self.pieces], axis=1)
            for part in range(3)
        )
        return {
            row.number: Likelihood(
                -losses[at][there].astype(np.float64), likeliest[at][there], row.left_out
            )
            for at, row in enumerate(self.rows)
            for there in [wanted[at] >= 0]
        }
