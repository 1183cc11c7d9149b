"""Drawing: how a traced `init` makes parameters, each from a key of its own."""

from __future__ import annotations

from collections.abc import Sequence

import meshdsl as md
from meshdsl.nn import initializers
from meshdsl.tensors.dims import Dimension, DimsLike


class Drawing:
    """Draws parameters in one dtype; the order of the calls decides which key each one gets.

    `draw = Drawing(key, 10, "float32"); draw.into(embed, [embed, d_ff])`.
    """

    def __init__(self, key: md.Tensor, count: int, dtype: object) -> None:
        self._keys = iter(md.random.split(key, count))
        self.dtype = dtype

    def into(self, over: DimsLike, dims: Sequence[Dimension], gain: float = 1.0) -> md.Tensor:
        """Returns weights that keep the variance of what is contracted over `over`."""
        return initializers.fan_in(over, gain)(next(self._keys), dims, self.dtype)

    def normal(self, std: float, dims: Sequence[Dimension]) -> md.Tensor:
        """Returns numbers with a standard deviation, as tables of embeddings have."""
        return initializers.normal(std)(next(self._keys), dims, self.dtype)

    def zeros(self, dims: Sequence[Dimension]) -> md.Tensor:
        return md.zeros(dims, self.dtype)

    def ones(self, dims: Sequence[Dimension]) -> md.Tensor:
        return md.ones(dims, self.dtype)


def plus(x: md.Tensor, bias: md.Tensor | None) -> md.Tensor:
    """Returns x + bias, or x where there is no bias."""
    if bias is None:
        return x
    biased = x + bias
    return biased
