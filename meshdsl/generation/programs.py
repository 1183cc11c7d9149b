"""The programs of a writer, compiled for a mesh and a layout.

`prepare` puts parameters where steps read them. `begin` makes the state before the first token.
`step` reads tokens, one or many, and chooses those that follow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl import nn, ops
from meshdsl.generation.stacks import LAYERS, Stacks
from meshdsl.layouts.layout import Layout, LayoutLike, Rule
from meshdsl.layouts.mesh import MeshLike
from meshdsl.layouts.validate import LayoutWarning
from meshdsl.lowering.lower import tensors_of
from meshdsl.lowering.program import SpmdProgram
from meshdsl.models.model import Cache, Decoding, Model
from meshdsl.ops import random
from meshdsl.running.jit import Compiled, jit
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.dtypes import accumulator
from meshdsl.tensors.named_array import spec
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.programs import places
from meshdsl.training.state import spec_of

if TYPE_CHECKING:
    from meshdsl.running.jit import Options

_OF_TRAINING = ("optimizer", "gradients")  # scopes of rules for steps of training only
# The settings of each row of a batch, with their dtypes. See `Sampling`; `number` is the number of
# the text, `read` how many of its positions come before the first token that is written. Beside
# these, each row has the `key` of its seed.
ROWS = {
    "temperature": np.dtype("float32"),
    "top_k": np.dtype("int32"),
    "top_p": np.dtype("float32"),
    "min_p": np.dtype("float32"),
    "repetition_penalty": np.dtype("float32"),
    "number": np.dtype("uint32"),
    "read": np.dtype("int32"),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes that programs are compiled for.

    Attributes:
        batch: the texts that are written at once.
        prompt: the positions of a prompt, pads included; of an encoder's, if there is one.
        new: the tokens that are written after it.
        chunk: the tokens of a prompt that are read at once.
    """

    batch: int
    prompt: int
    new: int
    chunk: int

    def tokens(self, length: int) -> list[Dimension]:
        """Returns the dims of tokens: [batch, length]."""
        return [Dimension("batch", self.batch), Dimension("length", length)]


@dataclass(frozen=True)
class Place:
    """Where programs run: as in `md.jit`. Rules for training only are left out.

    Attributes:
        unrolls: whether models are decoded with `Decoding.unrolled`, where they have it and no rule
            names `layers`.
    """

    mesh: MeshLike | None = None
    layout: LayoutLike | None = None
    backend: str = "jax"
    options: Options | None = None
    unrolls: bool = True

    def decoding(self, model: Model) -> Decoding:
        """Returns how a model writes text here."""
        assert model.decoding is not None
        stacked = any(rule.dim == LAYERS for rule in self._rules) or not self.unrolls
        return model.decoding if stacked else model.decoding.unrolled or model.decoding

    @property
    def _rules(self) -> tuple[Rule, ...]:
        rules = Layout.of(self.layout).rules
        return tuple(rule for rule in rules if rule.scope.split("/")[0] not in _OF_TRAINING)

    def program(
        self,
        function: Callable,
        arguments: Sequence[Any],
        donate: str | Sequence[str] = (),
        main: bool = False,
    ) -> Compiled:
        """Returns a function's program, compiled; arguments and errors as of `lowered`."""
        return self.lowered(function, arguments, donate, main).compile()

    def lowered(
        self,
        function: Callable,
        arguments: Sequence[Any],
        donate: str | Sequence[str] = (),
        main: bool = False,
    ) -> SpmdProgram:
        """Returns the program of a function.

        Args:
            main: whether every rule of the layout must fit this program. Other programs follow only
                the rules whose dims they have.

        Raises:
            ValueError: the layout does not fit.
        """
        rules = self._rules
        if not main:
            graph = jit(function).trace(*arguments)
            names = {name for tensor, _ in tensors_of(graph) for name in tensor.shape.names}
            rules = tuple(rule for rule in rules if rule.dim in names)
        jitted = jit(
            function,
            self.mesh,
            Layout(rules) if self.mesh is not None else None,
            self.backend,
            donate=donate,
            options=self.options,
        )
        with warnings.catch_warnings():
            if not main:
                warnings.simplefilter("ignore", LayoutWarning)  # the main program has warned
            return jitted.lower(*arguments)


class Programs:
    """The programs of a model that writes text.

    Attributes:
        sizes: those that they are compiled for.
        encodes: whether an encoder reads prompts.
        start: the token that the decoder then begins with; None: the last one of the prompt.
        like: dims and dtypes of the parameters.
        state: dims and dtypes of the state.
        fixed: those of what is fixed in all steps.
        prepare: parameters -> those that the other programs read, with their stacks of layers.
        begin: `prepared` parameters, the tokens of an encoder or None, pads, and the settings of
            rows (`ROWS`, and `key`) -> `state`, and what is `fixed` in all steps.
        steps: by the number of tokens that they read: prepared parameters, state, fixed, and tokens
            [batch, length] -> `state`, and `tokens` [batch, length=1]. With `ranked`, also
            `probabilities` of these tokens: `chosen`, the logarithm of theirs, [batch], and the
            `values` and `numbers` of the likeliest, [batch, ranked]; 0 if no row `reports` any.
        reading: with `reads`, a step that reads a chunk of a prompt, takes the token after each of
            its positions too, and has the probabilities `read` of these: [batch, length, ...].

    Args:
        filters: what steps compute to choose tokens; see `Sampling.filters`.
        lengths: how many tokens steps read. None: one, and a chunk of a prompt.
        ranked: of how many of the likeliest tokens steps have the probabilities; 0: of no token.
        reads: whether there is a step that has those of a prompt.

    Raises:
        ValueError: the layout or the mesh do not fit.
    """

    def __init__(
        self,
        model: Model,
        filters: Collection[str],
        sizes: Sizes,
        place: Place,
        lengths: Collection[int] | None = None,
        ranked: int = 0,
        reads: bool = False,
    ) -> None:
        assert model.decoding is not None
        self._reported = min(ranked, model.config.vocab)
        self._decoding, self._filters, self.sizes = place.decoding(model), filters, sizes
        self.encodes, self.start = self._decoding.empty is None, self._decoding.start
        self._vocab = Dimension("vocab", model.config.vocab)
        self.like: Any = spec_of(model.init)
        stacked = _prepare_by(model.decoding)
        prepared = result_spec(stacked, self.like)["params"]
        self._stacks: Stacks | None = None
        if self._decoding is not model.decoding:
            apart = result_spec(_prepare_by(self._decoding), self.like)["params"]
            self._stacks, prepared = Stacks(prepared, apart, place.program), apart
        begin = self._begin_arguments(prepared)
        begun = result_spec(self._begin, *begin)
        self.state: Any = begun["state"]
        self.fixed: Any = begun["fixed"]
        if lengths is None:
            lengths = {1, sizes.chunk} if self._decoding.empty else {1}
        self.steps: dict[int, Compiled] = {}
        with warnings.catch_warnings():
            for length in sorted(lengths):
                tokens = spec(sizes.tokens(length), "int32")
                step = (prepared, begun["state"], begun["fixed"], tokens)
                self.steps[length] = place.program(self._step, step, "state", main=True)
                warnings.simplefilter("ignore", LayoutWarning)  # the first one has warned
            self.reading: Compiled | None = None
            if reads and self._reported:
                tokens = spec(sizes.tokens(sizes.chunk), "int32")
                given = (prepared, begun["state"], begun["fixed"], tokens, tokens)
                self.reading = place.program(self._read_step, given, "state", main=True)
        self.prepare = place.program(stacked, [self.like], "params")
        self.begin = place.program(self._begin, begin)

    def places(self) -> list[Any]:
        """Returns the shardings of the parameters that `prepare` takes, without pads."""
        return places(self.prepare, self.like)

    def prepared(self, params: Any) -> Any:
        """Returns parameters as `begin` and `steps` read them; those that are given are donated."""
        prepared = self.prepare(params)["params"]
        return prepared if self._stacks is None else self._stacks(prepared)

    def _begin_arguments(self, params: Any) -> list[Any]:
        batch, _ = self.sizes.tokens(1)
        source = None
        if self.encodes:
            source = spec(self.sizes.tokens(self.sizes.prompt), "int32")
        rows: dict[str, Any] = {name: spec([batch], dtype) for name, dtype in ROWS.items()}
        rows["key"] = spec([batch, random.KEY], "uint32")
        if self._reported:
            rows["reports"] = spec([batch], "bool")
        return [params, source, spec([batch], "int32"), rows]

    def _begin(
        self, params: Any, source: Tensor | None, pads: Tensor, rows: dict[str, Tensor]
    ) -> dict[str, Any]:
        decoding, sizes = self._decoding, self.sizes
        if decoding.empty is not None:
            room = nn.slots_needed(sizes.prompt + sizes.new, decoding.window, sizes.chunk)
            cache = decoding.empty(pads, room)
        else:
            assert decoding.encode is not None and source is not None
            room = nn.slots_needed(sizes.new, decoding.window)
            cache = decoding.encode(params, source, pads, room)
        state: dict[str, Any] = {"cache": cache}
        if "repetition_penalty" in self._filters:
            state["seen"] = ops.zeros([pads.shape.get("batch"), self._vocab], "bool")
        return {"state": state, "fixed": rows}

    def _step(
        self, params: Any, state: dict[str, Any], fixed: dict[str, Tensor], tokens: Tensor
    ) -> dict[str, Any]:
        scores, read = self._decoding.step(params, tokens, state["cache"])
        return self._chosen(state, fixed, tokens, scores, read)

    def _read_step(
        self,
        params: Any,
        state: dict[str, Any],
        fixed: dict[str, Tensor],
        tokens: Tensor,
        targets: Tensor,
    ) -> dict[str, Any]:
        scores, read = self._decoding.step(params, tokens, state["cache"], every=True)
        last = ops.index(scores, "length", scores.shape.get("length").size - 1)
        probabilities = self._probabilities(scores, targets)
        return {"read": probabilities, **self._chosen(state, fixed, tokens, last, read)}

    def _chosen(
        self,
        state: dict[str, Any],
        fixed: dict[str, Tensor],
        tokens: Tensor,
        scores: Tensor,
        read: Cache,
    ) -> dict[str, Any]:
        """Returns what a step gives, by the scores [batch, vocab] of what follows its tokens."""
        cache, filters, raw = state["cache"], self._filters, scores
        state = {**state, "cache": read}
        if "repetition_penalty" in filters:
            positions = ops.arange(tokens.shape.get("length")) + cache.start
            of_text = ops.outer(ops.greater_equal, positions, cache.pads)
            state["seen"] = ops.scatter(
                state["seen"], ops.where(of_text, tokens, -1), True, self._vocab, mode="max"
            )
            scores = nn.penalise_seen(scores, state["seen"], fixed["repetition_penalty"])
        found: dict[str, Any] = {"state": state, **self._following(scores, read, fixed)}
        if self._reported:
            next_tokens = ops.index(found["tokens"], "length", 0)
            found["probabilities"] = ops.cond(
                ops.any(fixed["reports"]),
                lambda: self._probabilities(raw, next_tokens),
                lambda: self._no_probabilities(raw),
            )
        return found

    def _probabilities(self, scores: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Returns how likely tokens [...] are by the scores [..., vocab], and the likeliest."""
        scores = ops.cast(scores, accumulator(scores.dtype))
        logs = ops.log_softmax(scores, self._vocab)
        values, numbers = ops.top_k(logs, self._reported, self._vocab, "ranked")
        chosen = -nn.softmax_cross_entropy(scores, tokens, over=self._vocab.name)
        return {"chosen": chosen, "values": values, "numbers": numbers}

    def _no_probabilities(self, scores: Tensor) -> dict[str, Tensor]:
        """Returns zeros of the dims and dtypes of `_probabilities`."""
        dtype, rows = accumulator(scores.dtype), scores.shape.without([self._vocab.name])
        ranked = [*rows, Dimension("ranked", self._reported)]
        return {
            "chosen": ops.zeros(rows, dtype),
            "values": ops.zeros(ranked, dtype),
            "numbers": ops.zeros(ranked, "int32"),
        }

    def _following(
        self, scores: Tensor, read: Cache, fixed: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns what a step gives beside its state, by the scores [batch, vocab]."""
        filters = self._filters
        options: dict[str, Any] = {n: fixed[n] for n in ("top_k", "top_p", "min_p") if n in filters}
        if "noise" in filters:
            written = read.start - read.pads - fixed["read"]  # tokens of each row
            key = random.fold_in(fixed["key"], written)
            options["noise"] = nn.row_noise(key, fixed["number"], self._vocab)
            options["temperature"] = fixed["temperature"]
        chosen = nn.sample(scores, self._vocab, **options)
        return {"tokens": ops.broadcast(chosen, self.sizes.tokens(1))}


class BeamPrograms(Programs):
    """The programs of a search with beams: the rows of a text's beams follow each other.

    Attributes:
        steps: beside `state` they return `tokens` [batch, ranked], the likeliest to follow each
            row, and `scores`, the logarithms of their probabilities.
        reorder: state, and the beam that each row goes on with, s32[batch] -> `state`.
    """

    def __init__(self, model: Model, beams: int, sizes: Sizes, place: Place) -> None:
        self._beams, self._ranked = beams, min(2 * beams, model.config.vocab)
        super().__init__(model, frozenset(), sizes, place)
        rows = spec([Dimension("batch", sizes.batch)], "int32")
        self.reorder = place.program(self._reorder, [self.state, rows], "state")

    def _following(
        self, scores: Tensor, read: Cache, fixed: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        scores = ops.log_softmax(ops.cast(scores, "float32"), self._vocab)
        values, indices = ops.top_k(scores, self._ranked, self._vocab, "ranked")
        return {"scores": values, "tokens": indices}

    def _reorder(self, state: dict[str, Any], chosen: Tensor) -> dict[str, Any]:
        """Moves rows within their texts only, so layouts that split texts send nothing."""
        cache = state["cache"]
        texts = chosen.shape.get("batch").size // self._beams
        apart = [Dimension("batch", texts), Dimension("beams", self._beams)]
        beam = ops.split(chosen, "batch", apart)

        def moved(tensor: Tensor) -> Tensor:
            rows = ops.take(ops.split(tensor, "batch", apart), beam, "beams")
            return ops.transpose(ops.merge(rows, ["batch", "beams"], "batch"), tensor.shape.names)

        layers = {
            stack: {name: moved(tensor) for name, tensor in tensors.items()}
            for stack, tensors in cache.layers.items()
        }
        return {"state": {**state, "cache": cache.replace(layers=layers)}}


def _prepare_by(decoding: Decoding) -> Callable[[Any], dict[str, Any]]:
    def prepare(params: Any) -> dict[str, Any]:
        return {"params": decoding.prepare(params)}

    return prepare


def result_spec(function: Callable, *arguments: Any) -> Any:
    """Returns what a function of tensors returns, as a tree of `md.spec`."""
    lowered = jit(function, backend="numpy").lower(*arguments)
    specs = [spec(value.shape, value.dtype) for value in lowered.block.outputs]
    return lowered.origin.results.unflatten(specs)
