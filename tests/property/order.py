"""Random operations that look up, count, order and accumulate along dims."""

from __future__ import annotations

import math
from collections.abc import Callable

import meshdsl as md
from meshdsl.tensors.tensor import Tensor
from tests.property.author import VOLUME, Author, meet, together


def statistics(author: Author) -> None:
    x = author.operand()
    over = author.subset(x.shape.names, least=1)
    if not over:
        return
    kind = author.one(["prod", "var", "std", "norm1", "norm2", "norm_max", "median", "count"])
    y = author.spread(x, over)
    count = x.shape.select(over).volume
    if kind == "prod":
        author.keep(md.prod(md.tanh(y) + 0.3, over), 1.3**count)
    elif kind in ("var", "std"):
        more = 1.0 if count > 1 and author.rng.random() < 0.5 else 0.0
        if count > 1:
            author.keep(getattr(md, kind)(y, over, more), 4 * (author.bounds[x] + 2) ** 2)
    elif kind.startswith("norm"):
        order = {"norm1": 1, "norm2": 2, "norm_max": math.inf}[kind]
        author.keep(md.norm(y, over, order), (author.bounds[x] + 3) * count)
    elif kind == "median":
        author.keep(md.median(author.spread(x, over[:1]), over[0]), author.bounds[x] + 3)
    else:
        author.keep(md.count_nonzero(y > author.amount(), over), count)


def decide(author: Author) -> None:
    if author.masks:
        mask = author.one(author.masks)
        over = author.subset(mask.shape.names, least=1)
        if over:
            author.keep(author.one([md.any, md.all])(mask, over))


def extreme_place(author: Author) -> None:
    found = author.along()
    if found is not None:
        x, dim = found
        x = author.spread(x, [dim.name])
        author.keep(author.one([md.argmax, md.argmin])(x, dim), dim.size)


def accumulate(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    reverse, exclusive = (bool(b) for b in author.rng.random(2) < 0.4)
    kind = author.one(["cumsum", "cumsum", "cumprod", "cummax", "cummin", "linear_recurrence"])
    bound = author.bounds[x]
    if kind == "cumsum":
        y, bound = md.cumsum(x, dim, reverse, exclusive), bound * dim.size
    elif kind == "cumprod":
        y, bound = md.cumprod(md.sin(x) + 0.2, dim, reverse, exclusive), 1.2**dim.size
    elif kind == "linear_recurrence":
        decay = md.tanh(x + 0.4)
        y, bound = md.linear_recurrence(decay, x, dim, reverse, exclusive), bound * dim.size
    else:
        x = author.spread(x, [dim.name])
        y, bound = getattr(md, kind)(x, dim, reverse, False), bound + 3
    author.keep(y, bound)


def extreme_products(author: Author) -> None:
    """Products that leave float64 on their own, of what is zero or tiny, and results that do not.

    From 1e-290 on a dim goes up to 1 or 1e290; the logarithm of that is tame. A cotangent of 1e-15
    times 1e-290 is still a normal number: XLA takes others for 0, and a product would make them
    large again. Inside bodies it is 1e-100: these may be differentiated three times, and a third
    derivative is 1 / y**3.
    """
    found = author.along()
    if found is None or found[1].size < 3:
        return
    x, dim = found
    reverse = bool(author.rng.random() < 0.4)
    place = md.arange(dim)
    place = dim.size - 1 - place if reverse else place
    kind = author.one(["recurrence", "recurrence", "growth", "cumprod", "prod"])
    if kind == "recurrence":  # zeros, and growth from where they end
        start = int(author.rng.integers(1, dim.size))
        y = md.where(place >= max(start, dim.size - 2), x, 0)
        decay = md.full([dim], 1e200, "float64")
        decay = md.where(place == start, 0.0 if author.rng.random() < 0.3 else 1e5, decay)
        decay = md.where(place >= dim.size - 1, 0.5, decay)
        y = md.linear_recurrence(decay, y, dim, reverse)
        author.keep(1e-5 * y, author.bounds[x])
        return
    least = 100.0 if author.depth else 290.0
    span = least if kind == "prod" else 2 * least
    tiny, factor = 10**-least * (1.5 + 0.3 * md.tanh(x)), 10 ** (span / (dim.size - 1))
    if kind == "growth":
        y = md.linear_recurrence(
            md.full(x.shape, factor, "float64"), md.where(place == 0, tiny, 0), dim, reverse
        )
    else:
        y = md.where(place == 0, tiny, factor)
        y = md.prod(y, dim) if kind == "prod" else md.cumprod(y, dim, reverse)
    author.keep(0.01 * md.log(y), 8.0)


def order(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    y = author.spread(x, [dim.name])
    bound = author.bounds[x] + 3
    kind = author.one(["sort", "argsort", "top_k", "top_k", "nth_largest"])
    if kind == "sort":
        author.keep(md.sort(y, dim, bool(author.rng.random() < 0.5)), bound)
    elif kind == "argsort":
        author.keep(md.argsort(y, dim, bool(author.rng.random() < 0.5)), dim.size)
    elif kind == "nth_largest":
        author.keep(md.nth_largest(y, int(author.rng.integers(dim.size)), dim), bound)
    else:
        k = int(author.rng.integers(1, dim.size + 1))
        values, indices = md.top_k(y, k, dim, author.resized(dim.name))
        author.keep(values, bound)
        author.keep(indices, dim.size)


def take_along(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    indices = [t for t in author.integers if t.shape.find(dim.name) is not None]
    indices = [t for t in indices if together([x, t]).volume <= VOLUME]
    if indices:
        places = author.one(indices)
        places = md.broadcast(places, [*places.shape, *x.shape.without(places.shape.names)])
        author.keep(md.take_along(x, places, dim), author.bounds[x])
    else:
        places = (md.arange(dim) * 3 + int(author.rng.integers(-2, 5))) % (dim.size + 1)
        author.keep(md.take_along(x, places, dim), author.bounds[x])


def scatter(author: Author) -> None:
    found = author.along()
    if found is None or not author.integers:
        return
    x, dim = found
    indices = author.one(author.integers)
    if indices.shape.find(dim.name) is not None and author.rng.random() < 0.5:
        indices = md.index(indices, dim.name, 0)
    rest = x.shape.without([dim.name])
    if together([indices]).volume * rest.volume > VOLUME:
        return
    shared = [n for n in indices.shape.names if rest.find(n) is not None]
    gone = author.subset(shared)
    indices = md.take(indices, md.full([], 0, "int32"), gone[0]) if gone else indices
    wanted = [d for d in rest if indices.shape.find(d.name) is None]
    updates: Tensor | float = author.amount()
    if author.rng.random() < 0.7:
        updates = md.sin(md.cast(indices, author.dtype) + 0.3)
        for d in wanted:
            updates = meet(md.add, updates, md.cos(md.arange(d, author.dtype) * 0.7))
    if author.rng.random() < 0.25:  # each place has one update, or it is outside
        new = md.Dimension(author.resized("update"), int(author.rng.integers(1, 6)))
        ways = md.arange(new) * int(author.rng.integers(1, 3)) + int(author.rng.integers(-2, 3))
        put = md.cos(md.cast(ways, author.dtype))
        author.keep(md.scatter(x, ways, put, dim, unique=True), author.bounds[x] + 1)
        return
    mode = author.one(["set", "add", "max", "min"])
    if mode in ("max", "min") and isinstance(updates, Tensor):
        updates = updates + 0.011 * author.amount()
    width = indices.shape.volume if mode == "add" else 1
    author.keep(md.scatter(x, indices, updates, dim, mode), author.bounds[x] + 3 * width)


def segments(author: Author) -> None:
    if not author.integers:
        return
    indices, into = author.one(author.integers), author.dim()
    x = author.operand()
    if together([x, indices]).volume > VOLUME:
        return
    over = author.subset(indices.shape.names, least=1) or None
    left = together([x, indices]).without(over or indices.shape.names)
    if left.find(into.name) is not None or left.volume * into.size > VOLUME:
        return
    if not indices.shape:
        return
    count = indices.shape.volume
    kind = author.one(["segment_sum", "segment_sum", "segment_mean", "bincount"])
    if kind == "bincount":
        kept = indices.shape.without(over or indices.shape.names)
        if kept.find(into.name) is None:
            author.keep(md.bincount(indices, into, over), count)
        return
    bound = author.bounds[x] * count
    x = md.broadcast(x, [*indices.shape.without(x.shape.names), *x.shape])
    author.keep(getattr(md, kind)(x, indices, into, over), bound)


def places(author: Author) -> None:
    masks = [m for m in author.masks if m.shape]
    if not masks:
        return
    mask = author.one(masks)
    dim = author.one(list(mask.shape))
    rest = mask.shape.without([dim.name])
    into = author.dim()
    if rest.find(into.name) is None and rest.volume * into.size <= VOLUME:
        author.keep(md.nonzero(mask, dim, into), dim.size)


def histogram(author: Author) -> None:
    x = author.operand()
    over = author.subset(x.shape.names, least=1)
    if over and x.shape.without(over).find("bin") is None and x.shape.find("bin") is None:
        edges = [-1.5 + author.amount(0.1), -0.3, 0.2 + author.amount(0.1), 1.1]
        author.keep(md.histogram(x, edges, "bin", over), x.shape.volume)


OPERATIONS: dict[Callable[[Author], None], float] = {
    statistics: 1.5,
    decide: 0.5,
    extreme_place: 0.7,
    accumulate: 1.5,
    extreme_products: 0.5,
    order: 1.2,
    take_along: 0.8,
    scatter: 1.2,
    segments: 0.8,
    places: 0.4,
    histogram: 0.3,
}
