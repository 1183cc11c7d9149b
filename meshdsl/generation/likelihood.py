"""Likelihoods: how likely a model finds texts after other texts, token by token.

Guarantees:
    A likelihood does not depend on the texts beside it, nor, up to rounding, on the batch size, the
    mesh and the layout.
    Texts are read in widths that are powers of two, so few programs are compiled.
    What several texts follow is read once for all of them: the continuations of a multiple choice.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshdsl import nn, ops
from meshdsl.generation.contexts import Group, Row, Widths, batches, grouped, power_of_two
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
        batch_size: how many texts are read at once. Where several follow the same text, as many of
            those before are read at once, and kept beside.
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
        # By these scalings a cache's size changes how positions turn.
        by_size = getattr(model.config, "rotary_scaling", "none") in ("dynamic", "longrope")
        self._shares = not by_size
        self._chunk = chunk or _CHUNK
        self._widest = -(-length // self._chunk) * self._chunk
        self.like: Any = spec_of(model.init)
        self._prepare = self._place.program(self._prepared, [self.like], "params")
        self._params_like = result_spec(self._prepared, self.like)["params"]
        self._programs: dict[tuple[str, Widths], Compiled] = {}
        first = self._narrowest  # the layout is checked before parameters are read
        self._lowered("score", Widths(first if self._encodes else 0, 0, first))
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
        alone, groups = grouped(rows, self._shares)
        waiting: list[_Waiting] = []
        for each in itertools.chain(self._read_alone(alone), self._read_groups(groups)):
            waiting.append(each)
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

    def _row(self, number: int, before: Sequence[int], text: Sequence[int]) -> Row:
        if not self._encodes:
            left_out = max(0, len(before) + len(text) - 1 - self.length)
            return Row(number, [], [*before[left_out:], *text[:-1]], text, left_out)
        left_out = max(0, len(before) - self.length - self._splits)
        before = before[left_out:]
        if self._splits:
            source, first = before[:-1], before[-1]
        else:
            assert self._decoding.start is not None
            source, first = before, self._decoding.start
        return Row(number, source, [first, *text[:-1]], text, left_out)

    @property
    def _narrowest(self) -> int:
        return min(_NARROWEST, self._chunk)

    def _read_alone(self, rows: Sequence[Row]) -> Iterator[_Waiting]:
        """Begins to read rows, and yields what is then known of some."""
        for first in range(0, len(rows), self.batch_size):
            some = rows[first : first + self.batch_size]
            source, text = (max(len(each) for each in all_) for all_ in _parts(some))
            width = min(power_of_two(text, self._narrowest), self._widest)
            widths = Widths(self._source_width(source), 0, width)
            padded = self._padded(some)
            texts, targets, pads = self._aligned(padded, self._read_width(text, widths))
            cache = self._begun([row.source for row in padded], pads, widths)
            yield self._scored(some, widths, cache, texts, targets)

    def _read_groups(self, groups: Sequence[Group]) -> Iterator[_Waiting]:
        """Begins to read what the rows of groups share, and then these; yields as `_read_alone`."""
        for first in range(0, len(groups), self.batch_size):
            some = self._padded(groups[first : first + self.batch_size])
            context = max(len(group.context) for group in some)
            tail = max(len(group.rows[0].tail) for group in some)
            narrowest = self._narrowest
            widths = Widths(
                self._source_width(max(len(group.source) for group in some)),
                min(power_of_two(context, narrowest), self._widest) if context else 0,
                min(power_of_two(tail, narrowest), self._widest),
            )
            chunk = self._chunk_of("read", widths)
            read = -(-context // chunk) * chunk
            texts, pads = aligned_right([group.context for group in some], read)
            cache = self._begun([group.source for group in some], pads, widths)
            for piece in range(0, read, chunk):
                given = named(texts[:, piece : piece + chunk], _TOKENS)
                cache = self._program("read", widths)(self._params, cache, given)["cache"]
            for rows, numbers in batches(groups[first : first + self.batch_size], self.batch_size):
                of_rows = np.array([*numbers, *[numbers[-1]] * (self.batch_size - len(rows))])
                copied = self._program("copy", widths)(
                    cache, named(of_rows.astype(np.int32), ["batch"])
                )
                size = self._read_width(max(len(row.tail) for row in rows), widths)
                tails, targets = self._tails(self._padded(rows), size)
                yield self._scored(rows, widths, copied["cache"], tails, targets)

    def _padded(self, some: Sequence[Any]) -> list[Any]:
        """Returns as many as are read at once; the last one stands in for others."""
        return [*some, *[some[-1]] * (self.batch_size - len(some))]

    def _source_width(self, longest: int) -> int:
        return power_of_two(longest, self._narrowest) if self._encodes else 0

    def _read_width(self, longest: int, widths: Widths) -> int:
        """Returns the positions of the chunks that have so many tokens."""
        chunk = self._chunk_of("score", widths)
        return -(-longest // chunk) * chunk

    def _begun(
        self, sources: Sequence[Sequence[int]], pads: NDArray[np.int32], widths: Widths
    ) -> Any:
        """Returns the caches of texts of which nothing has been read, or only by an encoder."""
        source = None
        if self._encodes:
            texts, pads = aligned_right(sources, widths.source)
            source = named(texts, _TOKENS)
        begin = self._program("begin", widths)
        return begin(self._params, source, named(pads, ["batch"]))["cache"]

    def _scored(
        self,
        rows: Sequence[Row],
        widths: Widths,
        cache: Any,
        texts: NDArray[np.int32],
        targets: NDArray[np.int32],
    ) -> _Waiting:
        """Begins to read texts after a cache, and to score what is wanted."""
        pieces, chunk = [], self._chunk_of("score", widths)
        for first in range(0, texts.shape[1], chunk):
            piece, wanted = (each[:, first : first + chunk] for each in (texts, targets))
            given = [self._params, cache, named(piece, _TOKENS)]
            if (wanted >= 0).any():
                given.append(named(np.maximum(wanted, 0), _TOKENS))
                state = self._program("score", widths)(*given)
                pieces.append((wanted, state["losses"], state["likeliest"]))
            else:
                state = self._program("read", widths)(*given)
            cache = state["cache"]
        return _Waiting(rows, pieces)

    def _tails(
        self, rows: Sequence[Row], width: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns what rows read after their context from the first position on, and targets."""
        tails = np.zeros((len(rows), width), np.int32)
        targets = np.full_like(tails, -1)
        for tail, target, row in zip(tails, targets, rows, strict=True):
            tail[: len(row.tail)], target[: len(row.wanted)] = row.tail, row.wanted
        return tails, targets

    def _aligned(
        self, rows: Sequence[Row], width: int
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

    def _chunk_of(self, kind: str, widths: Widths) -> int:
        """Returns how many tokens a program reads at once: a power of two, or all of them."""
        if not widths.context:
            return min(self._chunk, widths.text)
        if kind == "read":
            return min(self._chunk, widths.context)
        # What is read after a context begins at a multiple of this, as caches with a window need.
        return min(self._chunk, widths.context, widths.text)

    def _program(self, kind: str, widths: Widths) -> Compiled:
        key = (kind, widths)
        if key not in self._programs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LayoutWarning)  # the first one has warned
                self._programs[key] = self._lowered(*key).compile()
        return self._programs[key]

    def _lowered(self, kind: str, widths: Widths) -> SpmdProgram:
        """Lowers a program: to begin a cache, to read tokens, to score them too, to copy rows."""
        params, batch = self._params_like, Dimension("batch", self.batch_size)

        def tokens(length: int) -> Spec:
            return spec([batch, Dimension("length", length)], "int32")

        source = tokens(widths.source) if self._encodes else None
        begin = partial(self._begin, widths)
        arguments = [params, source, spec([batch], "int32")]
        if kind == "begin":
            return self._place.lowered(begin, arguments)
        cache = result_spec(begin, *arguments)["cache"]
        if kind == "copy":
            return self._place.lowered(copied_rows, [cache, spec([batch], "int32")])
        piece = tokens(self._chunk_of(kind, widths))
        if kind == "read":
            return self._place.lowered(self._read_tokens, [params, cache, piece], "cache")
        arguments = [params, cache, piece, piece]
        return self._place.lowered(self._score_tokens, arguments, "cache", main=True)

    def _prepared(self, params: Any) -> dict[str, Any]:
        return {"params": self._decoding.prepare(params)}

    def _begin(
        self, widths: Widths, params: Any, source: Tensor | None, pads: Tensor
    ) -> dict[str, Cache]:
        decoding, chunk = self._decoding, self._chunk_of("read", widths)
        room = nn.slots_needed(widths.positions, decoding.window, chunk)
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


def copied_rows(cache: Cache, rows: Tensor) -> dict[str, Cache]:
    """Returns a cache whose rows are those of another, by their numbers: s32[batch]."""
    numbers = rows.rename(batch="row")

    def chosen(tensors: Any) -> Any:
        return jax.tree.map(of_rows, tensors, is_leaf=lambda x: isinstance(x, Tensor))

    def of_rows(tensor: Tensor) -> Tensor:
        names = tensor.shape.names
        return ops.transpose(ops.take(tensor, numbers, "batch").rename(row="batch"), names)

    return {
        "cache": cache.replace(
            pads=chosen(cache.pads),
            layers=chosen(cache.layers),
            memory=chosen(cache.memory),
            memory_pads=chosen(cache.memory_pads),
        )
    }


def _parts(rows: Sequence[Row]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    return [row.source for row in rows], [row.text for row in rows]


@dataclass(frozen=True)
class _Waiting:
    """What the device is to say of rows: of each chunk, what is wanted, losses and likeliest."""

    rows: Sequence[Row]
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
