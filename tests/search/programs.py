"""Random training steps, machines and pinned rules: the inputs of the property test of bounds.

A case number decides everything. The nets mix what layouts divide differently: products over dims
of even and odd sizes, norms over features and over the batch, attention, a product with a batch
dim, positions that mix, loops over layers with and without recomputation, microbatches. Half of
the steps clip their gradients by the norm of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl import nn
from meshdsl.optim import AdamW, Sgd
from meshdsl.search.plans import Step
from meshdsl.search.steps import parts_of
from meshdsl.tensors.tensor import Tensor
from tests.search.steps import step_of

_MACHINES = ("v5p", "v5p", "h100", "h100", "v5e", "v4", "a100")
_DEVICES = (2, 3, 4, 4, 6, 8, 8, 16)
_ROWS = (6, 8, 12, 16, 32, 96)
_POSITIONS = (8, 12, 33, 64, 128)
_FEATURES = (8, 10, 24, 64, 96, 130, 256, 1000)


@dataclass(frozen=True)
class Case:
    """A step, and the machine that its layouts are for."""

    step: Step
    hardware: str
    devices: int
    slices: int


def make_case(number: int) -> Case:
    """Returns the case of a number; equal numbers give equal cases in every process."""
    rng = np.random.default_rng([number, 18])
    net = _Net(rng)
    optimizer = AdamW(1e-3) if rng.random() < 0.5 else Sgd(1e-3)
    counts = [n for n in parts_of(net.batch, "rows") if n <= 8]
    some = sorted({1, *(int(n) for n in rng.choice(counts, 2))}) if rng.random() < 0.5 else [1]
    if net.rows.size % 3 == 0 and rng.random() < 0.2:
        some = [1, 3]
    clip = 1.0 if number % 2 else None
    step = step_of(
        net.init, net.loss, net.batch, tuple(some), optimizer, batch_dim="rows", clip=clip
    )
    devices = int(rng.choice(_DEVICES))
    slices = 2 if devices % 4 == 0 and rng.random() < 0.2 else 1
    return Case(step, str(rng.choice(_MACHINES)), devices, slices)


class _Net:
    """A random net: a function of its parameters and a batch."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.dtype = str(rng.choice(["float32", "bfloat16"]))
        self.rows = md.Dimension("rows", int(rng.choice(_ROWS)))
        positions = int(rng.choice(_POSITIONS))
        self.length = md.Dimension("length", positions) if rng.random() < 0.6 else None
        names = ("embed", "wide", "other")
        sizes = {name: int(rng.choice(_FEATURES)) for name in names}
        self.dims = {name: md.Dimension(name, size) for name, size in sizes.items()}
        lead = [self.rows, *([self.length] if self.length else [])]
        self.batch = {"x": md.spec([*lead, self.dims["embed"]], "float32")}
        self.shapes: dict[str, list[md.Dimension]] = {}
        kinds: list[Callable[[str], Callable]] = [
            self._mlp, self._norm, self._batch_norm, self._scale, self._experts, self._softmax
        ]  # fmt: skip
        if self.length:
            kinds += [self._attention, self._attention, self._mixed]
        self.layers = md.Dimension("layers", int(rng.integers(2, 6)))
        self.before = self._blocks(kinds, int(rng.integers(0, 3)), stacked=False)
        self.inside = self._blocks(kinds, int(rng.integers(0, 4)), stacked=True)
        self.after = self._blocks(kinds, int(rng.integers(1, 3)), stacked=False)
        self.stacked = [name for name, dims in self.shapes.items() if self.layers in dims]
        self.remat = bool(rng.random() < 0.4)
        self.readout = bool(rng.random() < 0.6)
        if self.readout:
            self.shapes["readout"] = [self.dims["embed"], md.Dimension("classes", 120)]

    def init(self, key: Tensor) -> dict[str, Tensor]:
        keys = md.random.split(key, len(self.shapes))
        make = nn.initializers.normal(0.02)
        return {name: make(keys[i], dims) for i, (name, dims) in enumerate(self.shapes.items())}

    def loss(self, params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        params = {name: md.cast(value, self.dtype) for name, value in params.items()}
        x = md.cast(batch["x"], self.dtype)
        for block in self.before:
            x = x + block(x, params)
        if self.stacked:

            def body(x: Tensor, held: dict[str, Tensor]) -> tuple[Tensor, None]:
                for block in self.inside:
                    x = x + block(x, held)
                return x, None

            run = md.checkpoint(body) if self.remat else body
            x, _ = md.scan(run, x, {name: params[name] for name in self.stacked}, dim="layers")
        for block in self.after:
            x = x + block(x, params)
        if self.readout:
            x = md.log_softmax(md.einsum(x, params["readout"], over="embed"), "classes")
        return md.mean(md.square(md.cast(x, "float32")))

    def _blocks(
        self, kinds: list[Callable[[str], Callable]], count: int, stacked: bool
    ) -> list[Callable]:
        """Returns blocks, and adds their parameters to the shapes."""
        found = []
        for _ in range(count):
            first = len(self.shapes)
            make = kinds[self.rng.integers(len(kinds))]
            found.append(make(f"p{first}"))
            for name in [*self.shapes][first:] if stacked else ():
                self.shapes[name] = [self.layers, *self.shapes[name]]
        return found

    def _weight(self, name: str, *dims: md.Dimension) -> str:
        self.shapes[name] = [*dims]
        return name

    def _mlp(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        embed, inner = self.dims["embed"], self.dims[str(self.rng.choice(["wide", "other"]))]
        one, two = self._weight(name, embed, inner), self._weight(f"{name}b", inner, embed)
        act = [md.relu, md.gelu, md.tanh][self.rng.integers(3)]

        def block(x: Tensor, params: Any) -> Tensor:
            hidden = act(md.einsum(x, params[one], over="embed"))
            return md.einsum(hidden, params[two], over=inner.name)

        return block

    def _norm(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        return lambda x, params: nn.rms_norm(x, "embed")

    def _batch_norm(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        over = ["rows", "length"] if self.length else ["rows"]

        def block(x: Tensor, params: Any) -> Tensor:
            centred = x - md.mean(x, over)
            return centred * md.rsqrt(md.mean(md.square(centred), over) + 1.0)

        return block

    def _scale(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        self._weight(name, self.dims["embed"])
        return lambda x, params: md.tanh(x * params[name])

    def _softmax(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        return lambda x, params: md.softmax(x, "embed") * x

    def _experts(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        parts = md.Dimension("parts", int(self.rng.choice([4, 6, 8])))
        inner = self.dims["other"]
        self._weight(name, parts, self.dims["embed"], inner)
        self._weight(f"{name}b", parts, inner, self.dims["embed"])

        def block(x: Tensor, params: Any) -> Tensor:
            hidden = md.relu(md.einsum(x, params[name], over="embed"))
            return md.einsum(hidden, params[f"{name}b"], over=["parts", inner.name])

        return block

    def _attention(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        heads = md.Dimension("heads", int(self.rng.choice([2, 4, 6, 8])))
        size = md.Dimension("kv", int(self.rng.choice([8, 16, 64])))
        embed = self.dims["embed"]
        for part in "qkv":
            self._weight(f"{name}{part}", embed, heads, size)
        self._weight(f"{name}o", heads, size, embed)

        def block(x: Tensor, params: Any) -> Tensor:
            q, k, v = (md.einsum(x, params[f"{name}{part}"], over="embed") for part in "qkv")
            k, v = (one.rename(length="memory_length") for one in (k, v))
            mixed = md.attention(q, k, v, over="memory_length", causal=True)
            return md.einsum(mixed, params[f"{name}o"], over=["heads", "kv"])

        return block

    def _mixed(self, name: str) -> Callable[[Tensor, Any], Tensor]:
        assert self.length is not None
        self._weight(name, self.length, md.Dimension("memory_length", self.length.size))

        def block(x: Tensor, params: Any) -> Tensor:
            return md.einsum(x.rename(length="memory_length"), params[name], over="memory_length")

        return block
