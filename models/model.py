"""Model: what a trainer needs to know of a model family, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl import nn
from meshdsl.models.overrides import apply_overrides
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.named_array import Spec


def token_batch(batch_size: int, length: int) -> dict[str, Spec]:
    """Returns the batch of a language model: tokens, and the token that follows each."""
    dims = md.dims(batch=batch_size, length=length)
    return {"tokens": md.spec(dims, "int32"), "targets": md.spec(dims, "int32")}


def packed_batch(batch_size: int, length: int) -> dict[str, Spec]:
    """Returns the batch of a language model whose rows hold several documents.

    `segments` tells them apart, from 1, with 0 where there is nothing; `positions` count in each.
    """
    dims = md.dims(batch=batch_size, length=length)
    more = {"segments": md.spec(dims, "int32"), "positions": md.spec(dims, "int32")}
    return token_batch(batch_size, length) | more


def learned_in(batch: Mapping[str, Spec]) -> dict[str, Spec]:
    """Returns a batch that says which targets are learned: 1 in `learned`, the others 0."""
    return {**batch, "learned": batch["targets"]}


class Cache(md.Module):
    """What a model that writes text keeps of the text so far.

    Attributes:
        start: s32[]; how many positions have been read, pads included.
        pads: s32[batch]; how many positions at the start of a row are pads.
        layers: of each stack of layers, tensors [layers, batch, memory_length, ...] by name; with
            pages, [layers, memory_length, ...]. A stack that is unrolled has a tensor for each of
            its layers, without the dim.
        memory: what the decoder of an encoder-decoder attends to, likewise.
        memory_pads: s32[batch]; how many of its positions are pads, at the start.
        pages: of a paged cache: whose text has which slot.

    Examples:
        >>> from meshdsl.models import Cache
        >>> batch, slots, kv = md.dims(batch=2, memory_length=8, kv=4)
        >>> keys = md.zeros([md.Dimension("layers", 3), batch, slots, kv])
        >>> cache = Cache(md.named(5, []), md.named([0, 2], [batch]), {"blocks": {"keys": keys}})
        >>> print(cache.room, cache.slots(md.Dimension("length", 1)).text_positions)
        memory_length=8 s32[length=1, batch=2] [[5 3]]
    """

    start: md.Tensor
    pads: md.Tensor
    layers: Mapping[str, Mapping[str, md.Tensor]]
    memory: Mapping[str, md.Tensor] | None = None
    memory_pads: md.Tensor | None = None
    pages: nn.Pages | None = None

    @property
    def room(self) -> Dimension:
        """The dim of the layers' slots, `memory_length`."""
        return next(iter(next(iter(self.layers.values())).values())).shape.get("memory_length")

    def slots(self, length: Dimension) -> nn.Slots:
        """Returns where the tokens of a step, [batch, length], are in the layers' caches."""
        where = length, self.room, self.start, self.pads
        return nn.Slots(*where) if self.pages is None else nn.PagedSlots(*where, self.pages)

    def after(self, slots: nn.Slots, layers: Mapping[str, Mapping[str, md.Tensor]]) -> Cache:
        """Returns the cache after a step that had these slots, and left these layers."""
        start = self.start + slots.length.size
        return self.replace(start=start, layers=layers, pages=slots.pages)


@dataclass(frozen=True)
class Decoding:
    """How a model writes text: it reads tokens in steps, and scores what comes next.

    All are traced. Several texts are rows of a batch; shorter ones begin with pads, any tokens.

    Attributes:
        empty: pads [batch] and the number of positions to keep -> a `Cache`. For models without an
            encoder.
        encode: parameters, tokens [batch, length], pads and the number of positions to keep -> a
            `Cache`, for models that read a text by an encoder.
        step: parameters, tokens [batch, length] and a cache -> the scores of the tokens that follow
            the last of them, [batch, vocab], and the cache with the tokens. The scores of all:
            `every=True`, [batch, length, vocab].
        prepare: parameters -> parameters in the dtypes that steps compute in, which are read once
            for each token.
        start: the token that the first `step` after `encode` takes; the encoder reads a whole
            prompt, with its end token. None: the encoder takes all tokens of a prompt but the last
            one, and a `step` takes that.
        max_length: the most positions of a text; None: any number.
        window: how many positions back a token sees; None: all.
        paged: whether `step` also takes caches with `pages`: it has its slots from `Cache.slots`,
            and returns `Cache.after`.
        unrolled: the same for parameters and caches whose stacks are taken apart, which is faster:
            `prepare` has a tuple of a tensor for each of `layers` in the place of each stack. It
            is used where no rule of the layout names `layers`. Who replaces another function of a
            Decoding replaces that of `unrolled`, too, or sets it to None.

    Raises:
        ValueError: there is neither `empty` nor `encode`, or there are both; or `unrolled` has
            other numbers.

    Examples:
        A model that has read nothing but the last token: the one after it follows. A model with
        attention is in `examples/language_model.py`.

        >>> from types import SimpleNamespace
        >>> from meshdsl.generation import Sampling, Writer
        >>> from meshdsl.models import Cache, Decoding, Model
        >>> vocab, zero = md.Dimension("vocab", 10), md.zeros([], "int32")
        >>> def empty(pads, positions):
        ...     slots = [md.Dimension("layers", 1), *pads.dims, md.Dimension("memory_length", 1)]
        ...     return Cache(zero, pads, {"blocks": {"keys": md.zeros(slots)}})
        >>> def step(params, tokens, cache):
        ...     length = tokens.dims.get("length")
        ...     following = md.index(tokens, "length", length.size - 1) + params["by"]
        ...     return md.one_hot(following, vocab), cache.after(cache.slots(length), cache.layers)
        >>> model = Model(
        ...     "counting",
        ...     init=lambda key: {"by": md.full([], 1, "int32")},
        ...     loss=None,
        ...     config=SimpleNamespace(vocab=10),
        ...     decoding=Decoding(step, empty),
        ... )
        >>> writer = Writer(model, prompt_tokens=1, new_tokens=3, sampling=Sampling(temperature=0))
        >>> writer.load(md.jit(model.init)(md.random.key(0)))
        >>> [int(token) for (token,) in writer.write([[4]])]
        [5, 6, 7]
    """

    step: Callable[..., tuple[md.Tensor, Cache]]
    empty: Callable[[md.Tensor, int], Cache] | None = None
    encode: Callable[[Any, md.Tensor, md.Tensor, int], Cache] | None = None
    prepare: Callable[[Any], Any] = lambda params: params
    start: int | None = None
    max_length: int | None = None
    window: int | None = None
    paged: bool = False
    unrolled: Decoding | None = None

    def __post_init__(self) -> None:
        if (self.empty is None) == (self.encode is None):
            raise ValueError(
                "a Decoding begins a cache by `empty`, or by `encode` if the model has an encoder: "
                "give one of them"
            )
        other = self.unrolled
        if other is None:
            return
        facts = ("start", "max_length", "window")
        unlike = [name for name in facts if getattr(self, name) != getattr(other, name)]
        unlike += [] if (self.empty is None) == (other.empty is None) else ["empty"]
        if unlike:
            raise ValueError(
                f"`unrolled` decodes the same model, but has another {', '.join(unlike)}"
            )


@dataclass(frozen=True)
class Model:
    """A model that can be trained.

    Attributes:
        name: as shown in reports.
        init: traced; a random key -> parameters (a tree of tensors).
        loss: traced; parameters and a batch -> a scalar, or a pair of it and {name: metric}.
        update: traced; parameters after the optimizer's step, and what the loss adds -> parameters.
            For those that no gradient trains. None: there are none.
        batch_size, length: sensible defaults for training.
        batch_spec: (batch_size, length) -> the dims and dtypes of a batch.
        packed: whether the loss takes batches as of `packed_batch` too.
        masked: whether the loss takes batches as of `learned_in` too.
        config: the configuration it was made of: a frozen dataclass, or None. That of a model that
            writes text has `vocab`, the number of its tokens.
        rebuild: makes the model of another configuration; needed for overrides.
        decoding: how it writes text; None: it does not.

    Examples:
        >>> from meshdsl.models import Model
        >>> def init(key):
        ...     return {"w": md.random.normal(key, md.dims(embed=4))}
        >>> def loss(params, batch):
        ...     return md.mean(md.einsum(batch["x"], params["w"], over="embed") ** 2)
        >>> def batch_spec(batch_size, length):
        ...     return {"x": md.spec(md.dims(batch=batch_size, embed=4))}
        >>> model = Model("linear", init, loss, batch_size=8, batch_spec=batch_spec)
        >>> model.batch_spec(model.batch_size, model.length)
        {'x': f32[batch=8, embed=4]}
    """

    name: str
    init: Callable[[md.Tensor], Any]
    loss: Callable[[Any, Mapping[str, md.Tensor]], Any]
    batch_size: int = 16
    length: int = 128
    batch_spec: Callable[[int, int], Mapping[str, Spec]] = token_batch
    packed: bool = False
    masked: bool = False
    config: Any = None
    rebuild: Callable[[Any], Model] | None = None
    update: Callable[[Any, Mapping[str, md.Tensor]], Any] | None = None
    decoding: Decoding | None = None

    def with_overrides(self, text: str) -> Model:
        """Returns the model with some fields of its configuration changed: "layers=8,embed=512".

        Raises:
            ValueError: the model has no configuration, or the text does not fit it; it lists all
                problems.
        """
        if not text.strip():
            return self
        if self.config is None or self.rebuild is None:
            raise ValueError(
                f"{self.name} takes no overrides ({text}): give its Model a config and a rebuild"
            )
        return self.rebuild(apply_overrides(self.config, text, self.name))
