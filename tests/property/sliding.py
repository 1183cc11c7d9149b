"""Random convolutions and poolings, of any stride, dilation and padding that leaves something."""

from __future__ import annotations

from typing import Any

import meshdsl as md
from meshdsl.tensors.tensor import Tensor
from tests.property.author import VOLUME, Author, meet, together


def conv(author: Author) -> None:
    x = author.operand()
    if not x.shape:
        return
    count = int(author.rng.integers(1, min(2, len(x.shape)) + 1))
    spatial = [str(n) for n in author.rng.permutation(x.shape.names)[:count]]
    rest = [n for n in x.shape.names if n not in spatial]
    windows = [md.Dimension(f"w{i}", int(author.rng.integers(1, 5))) for i in range(count)]
    in_dim = author.one(rest) if rest and author.rng.random() < 0.6 else None
    grouped = [n for n in rest if n != in_dim and author.rng.random() < 0.2]
    free = [author.dim()] if author.rng.random() < 0.6 else []
    free = [d for d in free if x.shape.find(d.name) is None]
    held = [x.shape.get(n) for n in ([in_dim] if in_dim else []) + grouped]
    dims = [*windows, *held, *free]
    if md.Shape(dims).volume > 64:
        return
    filters: Tensor = md.zeros([], author.dtype) + 0.3
    for number, dim in enumerate(dims, 1):
        ramp = author.wave(dim, number, 0.9 + 0.1 * number)
        filters = meet(md.multiply, filters, ramp)
    filters = filters.transpose([dims[i] for i in author.rng.permutation(len(dims))])
    if author.rng.random() < 0.5:  # of what is trained, so that its gradient is asked for
        scalar = md.mean(md.tanh(author.operand()))
        filters = filters + scalar
    kind = md.conv if author.rng.random() < 0.7 else md.conv_transpose
    options = _options(author, spatial)
    mapping = dict(zip(spatial, [w.name for w in windows], strict=True))
    try:
        y = kind(x, filters, mapping, in_dim, free[0] if free and in_dim else None, **options)
    except ValueError:  # nothing left
        return
    if y.shape.volume > VOLUME:
        return
    count = md.Shape(windows).volume * (x.shape.get(in_dim).size if in_dim else 1)
    y = y.rename({name: author.resized(name) for name in spatial})
    author.keep(y, author.bounds[x] * count * 1.5)


def pool(author: Author) -> None:
    x = author.operand()
    spatial = author.subset(x.shape.names, least=1)[:2]
    if not spatial:
        return
    window = {n: int(author.rng.integers(1, min(4, x.shape.get(n).size) + 1)) for n in spatial}
    options = _options(author, spatial)
    try:
        if author.rng.random() < 0.5:
            y = md.max_pool(author.spread(x, spatial), window, **options)
        else:
            y = md.avg_pool(x, window, count_pads=bool(author.rng.random() < 0.5), **options)
    except ValueError:  # nothing left
        return
    if y.shape.volume <= VOLUME:
        y = y.rename({name: author.resized(name) for name in spatial})
        author.keep(y, author.bounds[x] + 3)


def upsample(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    factor = int(author.rng.integers(2, 4))
    if x.shape.volume * factor <= VOLUME:
        y = md.upsample(x, {dim.name: factor}, author.one(["nearest", "linear"]))
        author.keep(y.rename({dim.name: author.resized(dim.name)}), author.bounds[x])


def attention(author: Author) -> None:
    q = author.operand()
    if len(q.shape) < 2:
        return
    names = [str(n) for n in author.rng.permutation(q.shape.names)]
    length, kv = names[0], names[1]
    memory = "memory_" + length
    if len(memory) > 16 or q.shape.find(memory) is not None:
        return
    k, v = (md.sin(q + author.amount()).rename({length: memory}) for _ in range(2))
    if together([q, k]).volume > VOLUME:
        return
    options: dict[str, Any] = {"causal": bool(author.rng.random() < 0.4)}
    if author.rng.random() < 0.3:
        options["window"] = int(author.rng.integers(1, 5))
    if author.rng.random() < 0.3:
        options["soft_cap"] = 1.5
    if author.rng.random() < 0.3:
        options["segments"] = md.arange(q.shape.get(length)) // 2
    if author.rng.random() < 0.3:
        places = md.arange(k.shape.get(memory), author.dtype)
        options["bias"] = md.sin(places + author.amount()) * md.mean(author.operand())
    y = md.attention(q, k, v, over=memory, length=length, features=kv, **options)
    author.keep(y, 1.0)


def _options(author: Author, spatial: list[str]) -> dict[str, Any]:
    def numbers(high: int) -> Any:
        if author.rng.random() < 0.4:
            return int(author.rng.integers(1, high + 1))
        return {n: int(author.rng.integers(1, high + 1)) for n in spatial}

    padding: Any = author.one(["same", "valid", "explicit"])
    if padding == "explicit":
        padding = {n: tuple(int(p) for p in author.rng.integers(-1, 4, 2)) for n in spatial}
    return {"strides": numbers(3), "dilation": numbers(2), "padding": padding}


OPERATIONS = {conv: 2.5, pool: 1.2, upsample: 0.6, attention: 1.0}
