"""What look-ups, reductions, cumulative operations and sorts along a split dim send.

Next to it stands the least that any program could. S is the bytes of the result, n the devices:

- a combination of all shards that every device needs, 2 (n-1)/n S (what an all_reduce sends);
- something that one shard holds and every device needs, (n-1)/n S (what an all_gather sends);
- a cumulative result, what comes before a shard: one total, S over the size of the dim;
- a sort or a permutation, in the worst case all of a shard but 1/n of it: (n-1)/n S/n.

`pytest -s` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import meshdsl as md
from tests.lowering.plans import lowered
from tests.ops.agreement import random

ROWS, LENGTH, SPOTS = 8, 64, 4
rows, length = md.dims(rows=ROWS, length=LENGTH)
X = random([rows, length])
RNG = np.random.default_rng(0)
PLACES = md.named(RNG.integers(-1, 66, (ROWS, SPOTS)).astype(np.int32), [rows, "spot"])
ORDER = md.named(RNG.integers(0, 64, (ROWS, LENGTH)).astype(np.int32), [rows, length])
SEGMENT = md.Dimension("segment", SPOTS)

NUMBER, INDEX = 8 * ROWS, 4 * ROWS  # bytes of a result: one per row
SCALED = NUMBER + INDEX  # bytes of mantissas and exponents
FULL = NUMBER * LENGTH


def combined(size):
    return lambda n: 2 * (n - 1) / n * size


def gathered(size):
    return lambda n: (n - 1) * size


def totals(there, back):
    """What the devices' totals send: gathered, or to and from those who combine a share of them."""

    def sent(n):
        apart = shared(there + back)(n)
        return apart if apart <= 0.75 * gathered(there)(n) else gathered(there)(n)

    return sent


def together(*moves):
    return lambda n: sum(move(n) for move in moves)


def shared(size):
    return lambda n: (n - 1) / n * size


def permuted(size):
    return lambda n: (n - 1) / n * size / n


def nothing(n):
    return 0.0


def gradient(function):
    return lambda x, *rest: md.grad(lambda x: md.sum(md.sin(function(x, *rest))))(x)


def total(size):
    return lambda n: float(size)


# The operation, what a device sends on n devices, and the least that could be.
MOVES: dict[str, tuple[Callable, Callable, Callable]] = {
    "sum": (lambda x, p, o: md.sum(x, length), combined(NUMBER), combined(NUMBER)),
    "max": (lambda x, p, o: md.max(x, length), combined(NUMBER), combined(NUMBER)),
    "any": (lambda x, p, o: md.any(x > 0.9, length), combined(ROWS), combined(ROWS)),
    "norm": (lambda x, p, o: md.norm(x, length), combined(NUMBER), combined(NUMBER)),
    "var": (lambda x, p, o: md.var(x, length), combined(2 * NUMBER), combined(2 * NUMBER)),
    "argmax": (
        lambda x, p, o: md.argmax(x, length),
        combined(NUMBER + INDEX),
        combined(NUMBER + INDEX),
    ),
    "prod": (lambda x, p, o: md.prod(x, length), totals(SCALED, NUMBER), combined(NUMBER)),
    "prod, gradient": (  # the totals once; back go the product and that of all others
        gradient(lambda x, p, o: md.prod(x, length)),
        lambda n: gathered(SCALED)(n) if n == 2 else shared(2 * SCALED + NUMBER)(n),
        combined(NUMBER),
    ),
    "count_nonzero": (
        lambda x, p, o: md.count_nonzero(x > 0, length),
        combined(INDEX),
        combined(INDEX),
    ),
    "histogram, 2 bins": (
        lambda x, p, o: md.histogram(x, [-1.0, 0.0, 1.0], over=length),
        combined(2 * INDEX),
        combined(2 * INDEX),
    ),
    "bincount": (
        lambda x, p, o: md.bincount(o % 4, SEGMENT, length),
        combined(SPOTS * INDEX),
        combined(SPOTS * INDEX),
    ),
    "segment_sum": (
        lambda x, p, o: md.segment_sum(x, o % 4, SEGMENT, length),
        combined(SPOTS * NUMBER),
        combined(SPOTS * NUMBER),
    ),
    "segment_max": (
        lambda x, p, o: md.segment_max(x, o % 4, SEGMENT, length),
        combined(SPOTS * NUMBER),
        combined(SPOTS * NUMBER),
    ),
    "nonzero": (
        lambda x, p, o: md.nonzero(x > 0, length, SEGMENT),
        together(totals(INDEX, INDEX), combined(SPOTS * INDEX)),
        combined(SPOTS * INDEX),
    ),
    "take": (
        lambda x, p, o: md.take(x, p, length),
        combined(SPOTS * NUMBER),
        shared(SPOTS * NUMBER),
    ),
    "take, gradient": (
        gradient(lambda x, p, o: md.take(x, p, length)),
        combined(SPOTS * NUMBER),
        shared(SPOTS * NUMBER),
    ),
    "scatter": (lambda x, p, o: md.scatter(x, p, 1.0, length, "add"), nothing, nothing),
    "scatter, max": (lambda x, p, o: md.scatter(x, p, 1.0, length, "max"), nothing, nothing),
    "take_along": (
        lambda x, p, o: md.take_along(x, o, length),
        lambda n: min(permuted(2.5 * FULL)(n), shared(FULL)(n)),
        permuted(FULL),
    ),
    "cumsum": (lambda x, p, o: md.cumsum(x, length), totals(NUMBER, NUMBER), total(NUMBER)),
    "cumsum, gradient": (
        gradient(lambda x, p, o: md.cumsum(x, length)),
        totals(2 * NUMBER, 2 * NUMBER),
        total(2 * NUMBER),
    ),
    "cumprod": (lambda x, p, o: md.cumprod(x, length), totals(SCALED, SCALED), total(NUMBER)),
    "cummax": (lambda x, p, o: md.cummax(x, length), totals(NUMBER, NUMBER), total(NUMBER)),
    "linear_recurrence": (
        lambda x, p, o: md.linear_recurrence(x, x, length),
        totals(NUMBER + SCALED, NUMBER),
        total(NUMBER),
    ),
    "sort": (lambda x, p, o: md.sort(x, length), permuted(2 * FULL), permuted(FULL)),
    "argsort": (
        lambda x, p, o: md.argsort(x, length),
        permuted(1.5 * FULL),
        permuted(0.5 * FULL),
    ),
    "top_k, 4": (
        lambda x, p, o: md.top_k(x, 4, length, "spot"),
        totals(4 * (NUMBER + INDEX), 4 * (NUMBER + INDEX)),
        combined(4 * (NUMBER + INDEX)),
    ),
    "top_k, 4, gradient": (
        gradient(lambda x, p, o: md.top_k(x, 4, length, "spot")[0]),
        totals(4 * (NUMBER + INDEX), 4 * (NUMBER + INDEX)),
        combined(4 * (NUMBER + INDEX)),
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_sent(name):
    function, expected, least = MOVES[name]
    for devices in (2, 4, 8):
        program = lowered(function, X, PLACES, ORDER, layout="length:x", mesh=f"x:{devices}")
        sent, bound = program.wire_bytes, least(devices)
        print(f"{name:20} on {devices} devices: {sent:6.0f} bytes, at least {bound:6.0f}")
        assert sent == expected(devices)
        assert sent >= bound


def test_a_sort_without_another_dim_to_split_gathers():
    x = random([length])
    program = lowered(lambda x: md.sort(x, length), x, layout="length:x", mesh="x:4")
    assert [c.kind for c in program.collectives] == ["all_gather"]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_largest_of_one_dim_are_gathered_as_candidates_or_as_the_dim(devices):
    """As two rows of the table in docs/guides/operations.md say."""
    x = random([md.Dimension("length", 4096)])
    for k in (4, 4096 // devices, 3000):
        program = lowered(
            lambda x: md.top_k(x, k, "length", "spot"),  # noqa: B023 - called at once
            x,
            layout="length:x",
            mesh=f"x:{devices}",
        )
        candidates = (devices - 1) * k * (8 + 4)  # float64 numbers and positions
        whole = (devices - 1) / devices * 4096 * 8
        assert program.wire_bytes == (candidates if k == 4 else whole)


def test_other_dims_stay_split():
    """Nothing but what the operation mixes moves: one row in `rows` times as many devices."""
    for name in ("cumsum", "sort", "top_k, 4", "take", "argmax", "segment_sum", "prod"):
        function, _, _ = MOVES[name]
        one = lowered(function, X, PLACES, ORDER, layout="length:x", mesh="x:2")
        both = lowered(function, X, PLACES, ORDER, layout="length:x; rows:y", mesh="x:2,y:4")
        assert both.wire_bytes == one.wire_bytes / 4
        assert {c.axes for c in both.collectives} == {("x",)}


def test_whole_dims_cost_nothing():
    for name, (function, _, _) in MOVES.items():
        program = lowered(function, X, PLACES, ORDER, layout="rows:x", mesh="x:4")
        assert program.collectives == (), name
