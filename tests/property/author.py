"""The author of a random program: the tensors made so far, and draws among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.tensors.dtypes import accumulator, as_dtype
from meshdsl.tensors.tensor import Tensor

VOLUME = 768  # elements of the largest tensor
BOUND = 30.0  # magnitude above which a result is scaled down or squashed


class Author:
    """Draws operations on the tensors that it keeps.

    Attributes:
        dtype: that of all floating-point tensors.
        live: floating-point tensors with bounds on their magnitudes.
        integers, masks: the other tensors.
        unused: those of `live` that nothing has read.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        sizes: dict[str, int],
        differentiable: bool,
        depth: int = 0,
        dtype: str = "float64",
    ) -> None:
        self.rng = rng
        self.sizes = sizes
        self.differentiable = differentiable
        self.depth = depth
        self.dtype = as_dtype(dtype)
        self.bounds: dict[Tensor, float] = {}
        self.live: list[Tensor] = []
        self.integers: list[Tensor] = []
        self.masks: list[Tensor] = []
        self.unused: list[Tensor] = []
        self.numbers = itertools.count(1)

    def keep(self, tensor: Tensor, bound: float = 1.0) -> Tensor:
        """Adds a tensor, squashed if it may be large."""
        if tensor.dtype == self.dtype:
            if bound > BOUND:
                if self.rng.random() < 0.5:
                    tensor, bound = tensor * (1 / bound), 1.0
                else:
                    tensor, bound = md.tanh(tensor), 1.0
            self.live.append(tensor)
            self.unused.append(tensor)
        elif tensor.dtype == np.bool_:
            self.masks.append(tensor)
        elif tensor.dtype == np.int32:
            self.integers.append(tensor)
        self.bounds[tensor] = bound
        return tensor

    @property
    def count(self) -> int:
        """The number of tensors kept."""
        return len(self.live) + len(self.masks) + len(self.integers)

    def loss(self) -> Tensor:
        """Returns a smooth function of everything that nothing else has read."""
        total = md.zeros([], self.dtype)
        for tensor in self.unused or self.live[-1:]:
            each = md.square(tensor) if self.rng.random() < 0.5 else md.sin(tensor + 0.3)
            part = md.mean(each) if self.rng.random() < 0.5 else 0.01 * md.sum(each)
            total = total + part
        return total

    def results(self) -> list[Tensor]:
        """Returns a few tensors to compare by themselves."""
        found = self.live[-2:] + self.integers[-1:] + self.masks[-1:]
        return [t for t in found if t.shape.volume <= VOLUME]

    # Draws.

    def one(self, among: Sequence[Any]) -> Any:
        return among[int(self.rng.integers(len(among)))]

    def operand(self) -> Tensor:
        """Returns a floating-point tensor, rather one that nothing has read."""
        tensor = self.one(self.unused if self.unused and self.rng.random() < 0.6 else self.live)
        self.unused = [t for t in self.unused if t is not tensor]
        return tensor

    def operands(self, count: int) -> list[Tensor] | None:
        """Returns tensors that together are not too large."""
        for _ in range(8):
            found = [self.one(self.live) for _ in range(count)]
            if together(found).volume <= VOLUME:
                self.unused = [t for t in self.unused if not any(t is f for f in found)]
                return found
        return None

    def along(self) -> tuple[Tensor, md.Dimension] | None:
        """Returns a floating-point tensor and one of its dims."""
        x = self.operand()
        return (x, self.one(list(x.shape))) if x.shape else None

    def resized(self, name: str) -> str:
        """Returns a name for a dim whose size has changed; sizes go by their names here."""
        return f"{name.split('_')[0]}_r{next(self.numbers)}"

    def amount(self, scale: float = 1.0) -> float:
        return float(self.rng.uniform(-scale, scale))

    def subset(self, names: Sequence[str], least: int = 0) -> list[str]:
        if len(names) < least:
            return []
        while True:
            found = [str(n) for n in self.rng.permutation(list(names)) if self.rng.random() < 0.5]
            if len(found) >= least:
                return found

    def dim(self) -> md.Dimension:
        name = self.one(list(self.sizes))
        return md.Dimension(name, self.sizes[name])

    def spread(self, x: Tensor, over: Sequence[str]) -> Tensor:
        """Returns x with a different amount added along each of some dims: no ties."""
        for name in over:
            x = x + self.amount(0.5) * self.wave(x.shape.get(name), 0.2, 1.7)
        return x

    def wave(self, dim: md.Dimension, start: float, rate: float | None = None) -> Tensor:
        """Returns a sine along a dim; for half precision it is computed in float32."""
        ramp = md.arange(dim, accumulator(self.dtype))
        ramp = ramp if rate is None else ramp * rate
        return md.cast(md.sin(ramp + start), self.dtype)

    def inside(self) -> Author:
        """Returns the author of a body."""
        inner = Author(self.rng, self.sizes, self.differentiable, self.depth + 1, self.dtype)
        inner.numbers = self.numbers
        return inner

    def fit(self, x: Tensor, shape: md.Shape) -> Tensor:
        """Returns the mean of x over the dims that `shape` lacks, with the dims it has."""
        gone = [name for name in x.shape.names if shape.find(name) is None]
        x = md.mean(x, gone) if gone else x
        return md.broadcast(x, shape) if self.rng.random() < 0.5 else x + md.zeros(shape, x.dtype)


def together(tensors: Sequence[Tensor]) -> md.Shape:
    return md.Shape({d.name: d for t in tensors for d in t.shape}.values())


def meet(function: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Returns an elementwise function of operands, spelled as an outer product where it is one.

    Raises:
        AssertionError: what is an outer product is not refused without being spelled so.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    rank = len(together(tensors))
    if any(len(tensor.shape) == rank for tensor in tensors):
        return function(*operands)
    try:
        function(*operands)
    except ValueError as error:
        assert "one operand must have the dims of all" in str(error), error
        return md.outer(function, *operands)
    raise AssertionError(f"an outer product of {', '.join(map(str, tensors))} is not refused")


def some_dims(
    rng: np.random.Generator, sizes: dict[str, int], low: int, high: int
) -> list[md.Dimension]:
    while True:
        names = rng.permutation(list(sizes))[: rng.integers(low, high + 1)]
        if math.prod(sizes[n] for n in names) <= VOLUME:
            return [md.Dimension(str(n), sizes[n]) for n in names]
