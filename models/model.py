"""Model: what a trainer needs to know of a model family, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import meshdsl as md
from meshdsl.models.overrides import apply_overrides
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
        config: the configuration it was made of: a frozen dataclass, or None.
        rebuild: makes the model of another configuration; needed for overrides.
    """

    name: str
    init: Callable[[md.Tensor], Any]
    loss: Callable[[Any, Mapping[str, md.Tensor]], Any]
    batch_size: int = 16
    length: int = 128
    batch_spec: Callable[[int, int], Mapping[str, Spec]] = token_batch
    packed: bool = False
    config: Any = None
    rebuild: Callable[[Any], Model] | None = None
    update: Callable[[Any, Mapping[str, md.Tensor]], Any] | None = None

    def with_overrides(self, text: str) -> Model:
        """Returns the model with some fields of its configuration changed: "layers=8,embed=512".

        Raises:
            ValueError: the model has no configuration, or the text does not fit it; all told.
        """
        if not text.strip():
            return self
        if self.config is None or self.rebuild is None:
            raise ValueError(
                f"{self.name} takes no overrides ({text}): give its Model a config and a rebuild"
            )
        return self.rebuild(apply_overrides(self.config, text, self.name))
