"""Random operations that move along a dim by position: slices, pads, joins, shifts."""

from __future__ import annotations

import meshdsl as md
from tests.property.author import VOLUME, Author


def slice_(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    start, stop = sorted(int(i) for i in author.rng.integers(0, dim.size + 1, 2))
    if start < stop:
        step = int(author.one([1, 1, 2, 3]))
        ends = (start, stop, step) if author.rng.random() < 0.7 else (stop - 1, None, -step)
        author.keep(
            md.slice(x, dim.name, *ends).rename({dim.name: author.resized(dim.name)}),
            author.bounds[x],
        )


def index(author: Author) -> None:
    found = author.along()
    if found is not None:
        x, dim = found
        at = int(author.rng.integers(-dim.size, dim.size))
        author.keep(md.index(x, dim, at), author.bounds[x])


def pad(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    low, high = (int(i) for i in author.rng.integers(-2, 5, 2))
    interior = int(author.one([0, 0, 1, 2]))
    size = low + (dim.size - 1) * (interior + 1) + 1 + high
    if not 0 < size <= VOLUME * dim.size // x.shape.volume:
        return
    mode = author.one(["constant", "constant", "edge", "reflect", "symmetric", "wrap"])
    if mode == "constant":
        y = md.pad(x, dim, low, high, author.one([0, 0, 0.5]), interior=interior)
    elif min(low, high) >= 0 and max(low, high) < dim.size:
        if dim.size + low + high > VOLUME * dim.size // x.shape.volume:
            return
        y = md.pad(x, dim, low, high, mode=mode)
    else:
        return
    author.keep(y.rename({dim.name: author.resized(dim.name)}), author.bounds[x] + 1)


def join(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    y = md.sin(x)
    if author.rng.random() < 0.5 and dim.size > 1:
        y = md.slice(y, dim, 1)
    if author.rng.random() < 0.5:
        tensors = [y, x] if author.rng.random() < 0.5 else [x, y, x]
        if x.shape.volume * len(tensors) <= VOLUME:
            joined = md.concat(tensors, dim.name)
            author.keep(joined.rename({dim.name: author.resized(dim.name)}), author.bounds[x] + 1)
    elif y.shape == x.shape and 2 * x.shape.volume <= VOLUME:
        into = author.one([n for n, s in author.sizes.items() if s == 2] or ["pair"])
        if x.shape.find(into) is None:
            author.keep(md.stack([x, y], into), author.bounds[x] + 1)


def part(author: Author) -> None:
    found = author.along()
    if found is None or found[1].size < 2:
        return
    x, dim = found
    cut = int(author.rng.integers(1, dim.size))
    for piece in md.split_into(x, dim, [cut, dim.size - cut]):
        author.keep(piece.rename({dim.name: author.resized(dim.name)}), author.bounds[x])


def shift(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    by = int(author.rng.integers(-dim.size - 1, dim.size + 2))
    wrap = bool(author.rng.random() < 0.5)
    scalars = [t for t in author.integers if not t.shape]
    if scalars and author.rng.random() < 0.4:
        author.keep(md.shift(x, dim, author.one(scalars), wrap), author.bounds[x])
    else:
        author.keep(md.shift(x, dim, by, wrap), author.bounds[x])


def flip(author: Author) -> None:
    x = author.operand()
    over = author.subset(x.shape.names, least=1)
    if over:
        author.keep(md.flip(x, over), author.bounds[x])


def repeat(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    times = int(author.rng.integers(1, 4))
    if x.shape.volume * times <= VOLUME:
        kind = author.one([md.repeat, md.tile])
        author.keep(
            kind(x, dim, times).rename({dim.name: author.resized(dim.name)}), author.bounds[x]
        )


def dynamic(author: Author) -> None:
    found = author.along()
    if found is None:
        return
    x, dim = found
    scalars = [t for t in author.integers if not t.shape]
    start = author.one(scalars) if scalars else int(author.rng.integers(-2, dim.size + 2))
    size = int(author.rng.integers(1, dim.size + 1))
    if author.rng.random() < 0.5:
        y = md.dynamic_slice(x, dim, start, size)
        author.keep(y.rename({dim.name: author.resized(dim.name)}), author.bounds[x])
    else:
        update = md.cos(md.slice(x, dim, 0, size))
        author.keep(md.dynamic_update_slice(x, update, dim, start), author.bounds[x] + 1)


def difference(author: Author) -> None:
    found = author.along()
    if found is not None and found[1].size > 1:
        x, dim = found
        y = md.diff(x, dim)
        author.keep(y.rename({dim.name: author.resized(dim.name)}), 2 * author.bounds[x])


OPERATIONS = {
    slice_: 1.5,
    index: 0.7,
    pad: 1.5,
    join: 1.5,
    part: 0.7,
    shift: 1.2,
    flip: 0.8,
    repeat: 0.7,
    dynamic: 1.0,
    difference: 0.3,
}
