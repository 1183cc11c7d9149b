"""Small programs, each of which has collectives of one kind, over one axis or over two."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import meshdsl as md

a, b, c = md.dims(a=8, b=12, c=5)


class Move(NamedTuple):
    """A function of one array, with the layouts that make it send what it is named for."""

    kind: str
    function: Any
    layouts: tuple[tuple[str, str], ...]


def copied(x):
    return {"out": x}


def reduced(reduction):
    return lambda x: {"out": reduction(x, "a")}


OVER_ONE, OVER_TWO, OTHER_WAY = "x:4", "x:2,y:4", "y:2,x:3"
MOVES = [
    Move("all_gather", copied, (("x:4", "x/b:x"), ("x:2,y:4", "x/b:x+y"), ("x:2,y:3", "x/a:y+x"))),
    Move("all_to_all", copied, (("x:4", "x/a:x; out/b:x"), ("x:2,y:3", "x/a:y+x; out/b:y+x"))),
    Move("permute", copied, (("x:2,y:2", "x/a:x+y; out/a:y+x"), ("x:2,y:3", "x/b:x; out/b:y"))),
    Move(
        "reduce_scatter",
        reduced(md.sum),
        (("x:4", "x/a:x; out/b:x"), ("x:2,y:3", "x/a:y+x; out/b:y+x")),
    ),
    Move("all_reduce", reduced(md.sum), (("x:4", "a:x"), ("x:2,y:4", "a:y+x"), ("x:3", "a:x"))),
    Move("all_reduce", reduced(md.max), (("x:4", "a:x"), ("x:2,y:3", "a:y+x"))),
    Move("all_reduce", reduced(md.min), (("x:4", "a:x"), ("x:2,y:4", "a:x"))),
]
CASES = [
    (f"{move.kind}-{number}-{mesh}", move, mesh, layout)
    for number, move in enumerate(MOVES)
    for mesh, layout in move.layouts
]
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32".split()
DTYPES += ["float64", "complex64", "complex128"]


def data(dtype: str) -> md.NamedArray:
    """Returns numbers whose sums are exact, with the largest and smallest of integers."""
    rng = np.random.default_rng(0)
    kind = md.spec([], dtype).dtype
    numbers = rng.integers(0, 5, (a.size, b.size, c.size))
    if kind.kind == "b":
        return md.named(numbers > 2, [a, b, c])
    if kind.kind == "c":
        return md.named((numbers + 1j * numbers[::-1]).astype(kind), [a, b, c])
    numbers = numbers.astype(kind)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        numbers[1, 0, 0], numbers[2, 0, 0] = limits.max, limits.min
        numbers[:, 1, 1] = limits.max - 3
    return md.named(numbers, [a, b, c])
