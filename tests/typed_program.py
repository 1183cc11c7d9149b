"""A program as a user writes it; type checkers must see every type that it asserts."""

from collections.abc import Iterator, Sequence
from typing import Any, assert_type

import jax
import numpy as np
from numpy.typing import NDArray

import meshdsl as md
from meshdsl import models, nn, optim
from meshdsl.generation import Sampling, Score, Scorer, Text, Writer, write_texts
from meshdsl.training.data.examples import Source
from meshdsl.training.data.tokenizers import Tokenizer

BATCH, EMBED = md.dims(batch=8, embed=4)


class Linear(md.Module):
    weight: md.Tensor
    scale: float = md.static(default=1.0)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        return md.einsum(x, self.weight, over="embed") * self.scale

    @md.jit
    def apply(self, x: md.Tensor) -> md.Tensor:
        return self(x)


def loss(model: Linear, x: md.Tensor) -> md.Tensor:
    return md.mean(md.square(model(x)))


@md.jit
def double(x: md.Tensor, times: int = 2) -> md.Tensor:
    return x * times


@md.jit(mesh="data:2", layout="batch:data", donate="model")
def step(model: Linear, x: md.Tensor) -> tuple[md.Tensor, Linear]:
    value, gradient = md.value_and_grad(loss)(model, x)
    return value, Linear(model.weight - 0.1 * gradient.weight)


def halved(x: md.Tensor) -> md.Tensor:
    return md.while_loop(lambda y: md.sum(y) > 1, lambda y: y * 0.5, x)


def total(carry: md.Tensor, row: md.Tensor) -> tuple[md.Tensor, None]:
    return carry + row, None


def norms(tensors: Sequence[md.Tensor]) -> list[md.Tensor]:
    return [md.norm(tensor) for tensor in tensors]


def write(prompts: list[str], tokenizer: Tokenizer, source: Source) -> float:
    model = models.load("gpt_mini")
    writer = Writer(model, prompt_tokens=8, new_tokens=4, sampling=Sampling(temperature=0.8))
    for tokens in writer.write([[1, 2]]):
        assert_type(tokens, NDArray[np.int32])
    assert_type(write_texts(writer, tokenizer, prompts), Iterator[Text])
    score = Scorer(model, batch_size=4, length=8).score(source)
    assert_type(score, Score)
    return score.perplexity


def energy(x: jax.Array) -> jax.Array:
    return (x * x).sum()


x = md.named(np.ones((8, 4), np.float32), [BATCH, EMBED])
assert_type(x, md.NamedArray)
assert_type(x.dims, md.Shape)
assert_type(x + 1, md.Tensor)
assert_type(md.sum(x, over="batch"), md.Tensor)
assert_type(md.exp(x), md.Tensor)
assert_type(x["batch", 0], md.Tensor)
assert_type(double(x), md.Tensor)
assert_type(double(x, times=3), md.Tensor)

model = Linear(md.named(np.ones(4, np.float32), [EMBED]))
assert_type(model.weight, md.Tensor)
assert_type(model.apply(x), md.Tensor)
assert_type(step(model, x), tuple[md.Tensor, Linear])
assert_type(step.lower(model, x).wire_bytes, float)
assert_type(md.jit(loss, mesh="data:2")(model, x), md.Tensor)
assert_type(md.value_and_grad(loss)(model, x), tuple[md.Tensor, Linear])
assert_type(md.grad(loss)(model, x), Linear)
assert_type(md.checkpoint(loss)(model, x), md.Tensor)
assert_type(md.scan(total, md.zeros([EMBED]), x, dim="batch"), tuple[md.Tensor, None])
assert_type(md.cond(md.sum(x) > 0, halved, md.negative, x), md.Tensor)
assert_type(halved(x), md.Tensor)
assert_type(norms([x, x]), list[md.Tensor])
imported = md.from_jax(energy, names={"x": "batch embed"})
assert_type(imported.listing(x), str)
assert_type(md.jit(md.grad(imported), mesh="data:2")(*imported.named(x)), Any)
assert_type(md.Layout.parse("batch:data"), md.Layout)
assert_type(md.Mesh.parse("data:2"), md.Mesh)
assert_type(md.Options(), md.Options)
assert_type(nn.softmax_cross_entropy(x, md.argmax(x, "embed"), "embed"), md.Tensor)
assert_type(optim.AdamW(1e-3), optim.AdamW)
