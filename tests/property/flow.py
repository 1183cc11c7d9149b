"""Random operations with bodies: loops, branches, checkpoints, gradients within gradients."""

from __future__ import annotations

from typing import Any

import meshdsl as md
from meshdsl.tensors.tensor import Tensor
from tests.property.author import BOUND, VOLUME, Author, together


def draw_step(author: Author) -> None:
    """Draws an operation of any kind, in a body."""
    from tests.property.operations import step

    step(author)


def scan(author: Author) -> None:
    if author.depth > 1:
        return
    carry, dim = author.operand(), author.dim()
    xs = [t for t in author.live if t.shape.find(dim.name) is not None]
    xs = [xs[i] for i in author.rng.permutation(len(xs))[:2]] if author.rng.random() < 0.9 else []
    author.unused = [t for t in author.unused if not any(t is x for x in xs)]
    counters = [t for t in author.integers if t.shape.find(dim.name) is not None][:1]
    captured = [author.operand() for _ in range(author.rng.integers(0, 3))]
    grows = author.bounds[carry] + dim.size <= BOUND and author.rng.random() < 0.6
    counting = author.rng.random() < 0.3
    known: list[float] = []

    def body(state: Any, slices: Any) -> Any:
        inner = author.inside()
        held, count = state
        inner.keep(held, author.bounds[carry] + dim.size if grows else 1 + author.bounds[carry])
        for x, t in zip([*xs, *counters], slices, strict=True):
            inner.keep(t, author.bounds[x])
        for t in captured:
            inner.keep(t, author.bounds[t])
        for _ in range(author.rng.integers(1, 5)):
            draw_step(inner)
        last = inner.one(inner.unused or inner.live)
        new = inner.fit(last, held.shape)
        if grows:
            new = held + new * (1 / max(1.0, inner.bounds[last]))
        else:
            new = md.tanh(new + 0.5 * held)
        ys = [t for t in inner.live[1:] if t.shape.find(dim.name) is None]
        ys = [t for t in ys if t.shape.volume * dim.size <= VOLUME][-2:]
        known[:] = [inner.bounds[t] for t in ys]
        return (new, None if count is None else count + 2), (
            ys if author.rng.random() < 0.8 else []
        )

    start = (carry, md.full([], 3, "int32") if counting else None)
    (end, count), ys = md.scan(
        body, start, [*xs, *counters], dim, reverse=bool(author.rng.random() < 0.4)
    )
    author.keep(end, author.bounds[carry] + dim.size if grows else 1.0)
    if count is not None:
        author.keep(count, 99.0)
    for y, bound in zip(ys, known, strict=False):
        author.keep(y, bound)


def checkpoint(author: Author) -> None:
    if author.depth > 1:
        return
    given = [author.operand() for _ in range(author.rng.integers(1, 3))]
    captured = [author.operand() for _ in range(author.rng.integers(0, 2))]
    known: list[float] = []

    def body(*tensors: Tensor) -> Any:
        inner = author.inside()
        for like, t in zip([*given, *captured], [*tensors, *captured], strict=True):
            inner.keep(t, author.bounds[like])
        for t in author.integers[-1:]:
            inner.keep(t, author.bounds[t])
        for _ in range(author.rng.integers(1, 5)):
            draw_step(inner)
        results = (inner.unused or inner.live)[-3:]
        known[:] = [inner.bounds[t] for t in results]
        return results

    collectives = bool(author.rng.random() < 0.5)
    for result, bound in zip(md.checkpoint(body, (), collectives)(*given), known, strict=False):
        author.keep(result, bound)


def _drawn_inside(author: Author, t: Tensor, x: Tensor, captured: Tensor) -> Author:
    """Draws some steps of a body that is given `t` for x and captures a tensor."""
    inner = author.inside()
    inner.keep(t, author.bounds[x])
    inner.keep(captured, author.bounds[captured])
    for _ in range(author.rng.integers(1, 3)):
        draw_step(inner)
    return inner


def gradient(author: Author) -> None:
    if author.depth > 1:
        return
    x, captured = author.operand(), author.operand()

    def body(t: Tensor) -> Tensor:
        inner = _drawn_inside(author, t, x, captured)
        return inner.loss() + 0.01 * md.mean(md.sin(t)) + 0.01 * md.mean(md.sin(t))

    author.keep(md.tanh(md.grad(body)(x)))


def direction(author: Author) -> None:
    if author.depth > 1:
        return
    x, captured = author.operand(), author.operand()

    def body(t: Tensor) -> Tensor:
        inner = _drawn_inside(author, t, x, captured)
        return inner.one(inner.unused or inner.live)

    author.keep(md.tanh(md.jvp(body, (x,), (md.cos(x),))[1]))


def cond(author: Author) -> None:
    if author.depth > 1:
        return
    x = author.operand()
    mask = md.mean(author.operand()) > author.amount(0.3)
    captured = author.operand()

    def branch(twist: float) -> Any:
        def run(t: Tensor) -> Tensor:
            inner = author.inside()
            inner.keep(t, author.bounds[x])
            inner.keep(captured, author.bounds[captured])
            for _ in range(author.rng.integers(1, 4)):
                draw_step(inner)
            last = inner.one(inner.unused or inner.live)
            return md.tanh(inner.fit(last, t.shape) + twist * t)

        return run

    author.keep(md.cond(mask, branch(0.5), branch(-0.3), x), 1.0)


def while_loop(author: Author) -> None:
    if author.depth > 1:
        return
    if author.differentiable:  # finite differences would see through the stop
        return
    start = author.operand()
    x, captured = md.stop_gradient(start), md.stop_gradient(author.operand())
    if together([x, captured]).volume > VOLUME:
        return
    limit = int(author.rng.integers(0, 5))

    def body(state: Any) -> Any:
        held, count = state
        return md.tanh(0.7 * held + md.mean(captured) * 0.1), count + 1

    end, count = md.while_loop(
        lambda state: (state[1] < limit) & (md.max(md.abs(state[0])) > 0.05),
        body,
        (x, md.full([], 0, "int32")),
    )
    author.keep(end, author.bounds[start] + 1)
    author.keep(count, 9.0)


def map_(author: Author) -> None:
    found = author.along()
    if author.depth > 1 or found is None:
        return
    x, dim = found
    captured = author.operand()

    def body(t: Tensor) -> Tensor:
        inner = _drawn_inside(author, t, x, captured)
        last = inner.one(inner.unused or inner.live)
        return md.tanh(inner.fit(last, t.shape))

    author.keep(md.map(body, x, dim), 1.0)


def custom(author: Author) -> None:
    x = author.operand()

    @md.custom_gradient
    def twice(t: Tensor) -> Any:
        return 2.0 * t, lambda g: 2.0 * g

    author.keep(twice(x), 2 * author.bounds[x])


OPERATIONS = {
    scan: 2.0,
    checkpoint: 1.0,
    gradient: 0.4,
    direction: 0.5,
    cond: 0.8,
    while_loop: 0.8,
    map_: 0.5,
    custom: 0.3,
}
