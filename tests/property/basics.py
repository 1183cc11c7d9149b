"""Random operations of the basic kinds: elementwise, reductions, products, dims, look-ups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import meshdsl as md
from meshdsl.tensors.tensor import Tensor
from tests.property.author import BOUND, VOLUME, Author, meet, some_dims, together

# Elementwise operations.


def unary(author: Author) -> None:
    x = author.operand()
    shifted = x + author.amount()
    functions: list[tuple[Callable[[], Tensor], float]] = [
        (lambda: md.tanh(x), 1.0),
        (lambda: md.sin(2.0 * x), 1.0),
        (lambda: md.cos(x), 1.0),
        (lambda: md.exp(md.tanh(x)), 3.0),
        (lambda: md.expm1(md.sin(x)), 2.0),
        (lambda: md.log(md.square(x) + 0.5), 8.0),
        (lambda: md.log1p(x * x), 8.0),
        (lambda: md.sqrt(md.square(x) + 0.5), BOUND),
        (lambda: md.rsqrt(md.square(x) + 0.5), 2.0),
        (lambda: md.sigmoid(x), 1.0),
        (lambda: md.erf(x), 1.0),
        (lambda: md.gelu(x), author.bounds[x]),
        (lambda: md.silu(x), author.bounds[x]),
        (lambda: md.softplus(shifted), author.bounds[x] + 2),
        (lambda: md.relu(shifted), author.bounds[x] + 1),
        (lambda: md.abs(shifted), author.bounds[x] + 1),
        (lambda: -x, author.bounds[x]),
        (lambda: md.clip(shifted, -0.7, 0.9), 1.0),
        (lambda: x * (md.sign(shifted) + 0.5), 2 * author.bounds[x]),
        (lambda: 0.3 * md.round(3.0 * shifted) + x, 4 * author.bounds[x] + 2),
        (lambda: md.floor(shifted) - md.ceil(2.0 * shifted), 4 * author.bounds[x] + 5),
        (lambda: shifted % 1.7, 1.7),
        (lambda: (md.square(x) + 0.5) ** 0.7, BOUND),
        (lambda: 2.0 - x / 3, author.bounds[x] + 2),
    ]
    function, bound = author.one(functions)
    author.keep(function(), bound)


def binary(author: Author) -> None:
    found = author.operands(2)
    if found is None:
        return
    x, y = found
    b, c = author.bounds[x], author.bounds[y]
    functions: list[tuple[Callable[[Tensor, Tensor], Tensor], float]] = [
        (lambda x, y: x + y, b + c),
        (lambda x, y: x - y, b + c),
        (lambda x, y: x * y, b * c),
        (lambda x, y: x / (1 + md.square(y)), b),
        (lambda x, y: md.maximum(x, y + author.amount()), max(b, c) + 1),
        (lambda x, y: md.minimum(x + author.amount(), y), max(b, c) + 1),
        (lambda x, y: (md.square(x) + 0.5) ** md.tanh(y), b * b + 2),
        (lambda x, y: md.where(x > y + author.amount(), x, 2 * y), b + 2 * c),
    ]
    weights = np.array([3, 3, 3, 1, 1, 1, 1, 2]) / 15
    function, bound = functions[author.rng.choice(len(functions), p=weights)]
    author.keep(meet(function, x, y), bound)


def compare(author: Author) -> None:
    found = author.operands(2)
    if found is None:
        return
    x, y = found[0] + author.amount(), found[1]
    word = author.one(["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"])
    mask = meet(getattr(md, word), x, y)
    if author.masks and author.rng.random() < 0.5:
        other = author.one(author.masks)
        if together([mask, other]).volume <= VOLUME:
            both = [lambda x, y: x & ~y, lambda x, y: x | y]
            mask = meet(both[author.rng.random() < 0.5], mask, other)
    author.keep(mask)


def choose(author: Author) -> None:
    if not author.masks:
        return
    mask = author.one(author.masks)
    x = author.operand()
    y: Any = author.operand() if author.rng.random() < 0.5 else author.amount()
    tensors = [mask, x, *([y] if isinstance(y, Tensor) else [])]
    if together(tensors).volume > VOLUME:
        return
    bound = author.bounds[x] + (author.bounds[y] if isinstance(y, Tensor) else 1)
    chosen = (x, y) if author.rng.random() < 0.5 else (y, x)
    author.keep(meet(md.where, mask, *chosen), bound)


def convert(author: Author) -> None:
    kind = author.one(["mask", "integer", "round"])
    if kind == "mask" and author.masks:
        author.keep(md.cast(author.one(author.masks), author.one([author.dtype, "int32"])), 1.0)
    elif kind == "integer" and author.integers:
        author.keep(md.sin(md.cast(author.one(author.integers), author.dtype)), 1.0)
    elif kind == "round":
        x = md.tanh(author.operand())
        author.keep(md.cast(md.floor(4.0 * x + author.amount()), "int32"), 6.0)


def integer(author: Author) -> None:
    if not author.integers:
        return
    x, y = author.one(author.integers), author.one(author.integers)
    if together([x, y]).volume > VOLUME or author.bounds[x] * author.bounds[y] > 1e6:
        return
    bound = author.bounds[x] * author.bounds[y] + 99
    kind = author.one([md.add, md.subtract, md.multiply, None])
    author.keep(x % 5 if kind is None else meet(kind, x, y), bound)


def stop(author: Author) -> None:
    if not author.differentiable:
        x = author.operand()
        author.keep(md.stop_gradient(x), author.bounds[x])


# Reductions and products.


def reduce(author: Author) -> None:
    x = author.operand()
    over = author.subset(x.shape.names, least=1)
    if not over:
        return
    count = x.shape.select(over).volume
    kind = author.one(["sum", "sum", "mean", "max", "min", "logsumexp"])
    if kind == "sum":
        author.keep(md.sum(x, over), author.bounds[x] * count)
    elif kind == "mean":
        author.keep(x.mean(over), author.bounds[x])
    else:
        x = author.spread(x, over)
        author.keep(getattr(md, kind)(x, over), author.bounds.get(x, BOUND) + 3 * len(over))


def normalise(author: Author) -> None:
    x = author.operand()
    over = author.subset(x.shape.names, least=1)
    if over:
        x = author.spread(x, over)
        kind = author.one([md.softmax, md.log_softmax])
        author.keep(kind(x, over), 1.0 if kind is md.softmax else 2 * BOUND)


def einsum(author: Author) -> None:
    tensors = author.operands(int(author.rng.choice([1, 2, 2, 2, 2, 3])))
    if tensors is None:
        return
    dims = together(tensors)
    over = author.subset(dims.names)
    keep = dims.without(over)
    factors, tensors = tensors, [_summed_alone(t, tensors, over) for t in tensors]
    if author.rng.random() < 0.5:
        out = [dim if author.rng.random() < 0.5 else dim.name for dim in keep]
        result = md.einsum(*tensors, out=[out[i] for i in author.rng.permutation(len(out))])
    else:
        result = md.einsum(*tensors, over=[n for n in over if together(tensors).find(n)])
    count = dims.volume // keep.volume
    if count > 4 and author.rng.random() < 0.7:
        result, count = result * (1 / count), 1
    author.keep(result, math.prod(author.bounds[t] for t in factors) * count)


def _summed_alone(x: Tensor, tensors: Sequence[Tensor], over: Sequence[str]) -> Tensor:
    """Returns an operand of several, summed over those dims of `over` that no other has."""
    others = [t for t in tensors if t is not x]
    if len(others) != len(tensors) - 1 or not others:
        return x
    names = {name for t in others for name in t.shape.names}
    alone = [name for name in x.shape.names if name in over and name not in names]
    return md.sum(x, alone) if alone else x


# Dims.


def rename(author: Author) -> None:
    x = author.operand()
    old = author.subset(x.shape.names, least=1)
    taken = set(x.shape.names)
    names = {}
    for name in old:
        size = x.shape.get(name).size
        free = [n for n, s in author.sizes.items() if s == size and n not in taken]
        names[name] = author.one(free) if free and author.rng.random() < 0.8 else _twin(name)
        if names[name] in taken:
            return
        taken.add(names[name])
    if names:
        author.keep(x.rename(names), author.bounds[x])


def swap(author: Author) -> None:
    x = author.operand()
    by_size: dict[int, list[str]] = {}
    for dim in x.shape:
        by_size.setdefault(dim.size, []).append(dim.name)
    pairs = [names for names in by_size.values() if len(names) > 1]
    if pairs:
        a, b = author.one(pairs)[:2]
        author.keep(md.rename(x, {a: b, b: a}), author.bounds[x])


def _twin(name: str) -> str:
    return name[:-5] if name.endswith("_twin") else name + "_twin"


def split(author: Author) -> None:
    x = author.operand()
    if not x.shape:
        return
    dim = author.one(x.shape)
    factors = [n for n in range(1, dim.size + 1) if dim.size % n == 0]
    major = author.one(factors)
    parts = [
        md.Dimension(f"{dim.name}_{major}major", major),
        md.Dimension(f"{dim.name}_{major}minor", dim.size // major),
    ]
    known = [
        (m, n)
        for m in author.sizes
        for n in author.sizes
        if m != n and author.sizes[m] * author.sizes[n] == dim.size
    ]
    if known and author.rng.random() < 0.5:
        parts = [md.Dimension(n, author.sizes[n]) for n in author.one(known)]
    if len(dim.name) < 12 and not {p.name for p in parts} & set(x.shape.names):
        author.keep(md.split(x, dim, parts), author.bounds[x])


def merge(author: Author) -> None:
    x = author.operand()
    parts = author.subset(x.shape.names, least=1)[:3]
    if not parts:
        return
    volume = x.shape.select(parts).volume
    free = [n for n, s in author.sizes.items() if s == volume]
    into = author.one(free) if free and author.rng.random() < 0.7 else "_".join([*parts, "merged"])
    if len(into) < 24 and x.shape.without(parts).find(into) is None:
        author.keep(md.merge(x, parts, into), author.bounds[x])


def order(author: Author) -> None:
    x = author.operand()
    if len(x.shape) > 1:
        names = [str(n) for n in author.rng.permutation(x.shape.names)]
        author.keep(x.transpose(names), author.bounds[x])


def broadcast(author: Author) -> None:
    x = author.operand()
    dim = author.dim()
    if x.shape.find(dim.name) is None and x.shape.volume * dim.size <= VOLUME:
        dims = [*x.shape, dim]
        author.keep(
            md.broadcast(x, [dims[i] for i in author.rng.permutation(len(dims))]), author.bounds[x]
        )


# Tensors from nothing, look-ups, random numbers.


def create(author: Author) -> None:
    dim = author.dim()
    kind = author.one(["arange", "ramp", "full"])
    if kind == "arange":
        author.keep(md.arange(dim), float(dim.size))
    elif kind == "ramp":
        author.keep(author.wave(dim, author.amount()))
    else:
        author.keep(md.full([dim], author.amount(), author.dtype))


def take(author: Author) -> None:
    if not author.integers:
        return
    table, indices = author.operand(), author.one(author.integers)
    free = [n for n in table.shape.names if indices.shape.find(n) is None]
    shared = set(indices.shape.names) & set(table.shape.names)
    if shared or not free:
        names = {n: _twin(n) for n in shared}
        if any(_twin(n) in [*indices.shape.names, *table.shape.names] for n in shared):
            return
        indices = md.rename(indices, names)
        free = list(table.shape.names)
    if not free or indices.shape.volume * table.shape.volume > VOLUME:
        return
    author.keep(md.take(table, indices, author.one(free)), author.bounds[table])


def grouped(author: Author) -> None:
    pair = author.operands(2)
    if pair is None or not author.integers:
        return
    (x, w), group = pair, author.one(author.integers)
    free = w.shape.without([*x.shape.names, *group.shape.names]).names
    every = together([x, w, group])
    if not free or every.volume > VOLUME:
        return
    dim = author.one(free)
    dims = every.without([dim])
    keep = dims.without(author.subset(dims.names))
    out = [keep[i] for i in author.rng.permutation(len(keep))]
    count = dims.volume // keep.volume
    result = md.grouped_einsum(x, w, group, dim, out=out) * (1 / count)
    author.keep(result, author.bounds[x] * author.bounds[w])


def one_hot(author: Author) -> None:
    if not author.integers:
        return
    indices, dim = author.one(author.integers), author.dim()
    if indices.shape.find(dim.name) is None and indices.shape.volume * dim.size <= VOLUME:
        author.keep(
            md.one_hot(indices, dim, author.one([author.dtype, author.dtype, "int32", "bool"]))
        )


def draw(author: Author) -> None:
    dims = some_dims(author.rng, author.sizes, low=0, high=2)
    key = md.random.key(int(author.rng.integers(2**40)))
    kinds = "uniform normal bernoulli split names fold whole permutation order"
    kind = author.one(kinds.split())
    if kind == "uniform":
        author.keep(md.random.uniform(key, dims, author.dtype))
    elif kind == "normal":
        author.keep(md.random.normal(key, dims, author.dtype), 6.0)
    elif kind == "bernoulli":
        author.keep(md.random.bernoulli(key, 0.6, dims))
    elif kind == "names":
        both = md.random.split(key, ["one", "other"])
        author.keep(md.random.gumbel(both["other"], dims, author.dtype), 30.0)
    elif kind == "fold":
        key = md.random.fold_in(key, md.full([], 7, "int32"))
        author.keep(md.random.exponential(key, dims, author.dtype), 30.0)
    elif kind == "whole":
        author.keep(md.random.randint(key, -1, 6, dims), 6.0)
    elif kind == "permutation":
        author.keep(md.random.permutation(key, author.dim()), 12.0)
    elif kind == "order":
        logits = author.operand()
        if logits.shape:
            over = author.one(logits.shape.names)
            author.keep(md.random.categorical(key, logits, over), 12.0)
    else:
        author.keep(md.random.uniform(md.random.split(key, 3)[2], dims, author.dtype))


OPERATIONS = {
    unary: 3.0,
    binary: 4.0,
    compare: 1.0,
    choose: 1.0,
    convert: 1.0,
    integer: 0.4,
    stop: 0.5,
    reduce: 2.0,
    normalise: 1.0,
    einsum: 5.0,
    rename: 1.5,
    swap: 1.0,
    split: 1.5,
    merge: 1.5,
    order: 1.0,
    broadcast: 1.0,
    create: 1.0,
    take: 1.5,
    grouped: 1.0,
    one_hot: 1.0,
    draw: 1.0,
}
