"""Products and recurrences of zeros, infinities, NaN, and of what is very large or very small.

Every device count and every backend gives what a definition says: NaN where that is NaN, infinities
where it is infinite. Of products that is the exact product. Of recurrences it is a loop in the
dtype of the numbers, which rounds each step.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import run

pytestmark = pytest.mark.optimized  # it is about rounding

ROWS, LENGTH = 1000, 8
VALUES = [0, 1, -1, 1e20, -1e20, 1e-20, -1e-20, 1e30, -1e30, 1e-30, np.inf, -np.inf, np.nan]
PROBABLE = [1, 3, 2, 2, 1, 2, 1, 1, 1, 1, 0.25, 0.25, 0.25]  # ordinary numbers: 5
FLAGS = [(r, e) for r in (False, True) for e in (False, True)]
BACKENDS = ["numpy", "jax", "tf"]
MESHES = [None, "m:2", "m:4"]
TINY, LARGEST, EPSILON = float(np.finfo("f4").tiny), float(np.finfo("f4").max), 2e-6
LOST = 2.0**64  # times TINY: what a scan may lose of a state
length = md.Dimension("length", LENGTH)


def draw(seed):
    rng = np.random.default_rng(seed)
    weights = np.array([*PROBABLE, 5.0])
    kinds = rng.choice(len(weights), (ROWS, LENGTH), p=weights / weights.sum())
    ordinary = rng.uniform(0.5, 2, kinds.shape) * rng.choice([-1, 1], kinds.shape)
    found = np.append(VALUES, 0)[kinds]
    return np.where(kinds == len(VALUES), ordinary, found).astype(np.float32)


DECAY, X, WEIGHT = draw(10), draw(110), np.random.default_rng(3).uniform(0.5, 2, LENGTH)
WEIGHT = WEIGHT.astype(np.float32)


def product(factors):
    """The exact product, rounded once."""
    factors = [float(f) for f in factors]
    with np.errstate(all="ignore"):
        special = np.prod([np.sign(f) if np.isfinite(f) else f for f in factors])
        if not np.isfinite(special):
            return np.float32(special)
        exact = np.prod([Fraction(f) for f in factors])
        bound = 2 * Fraction(LARGEST)
        return np.float32(float(min(max(exact, -bound), bound)))


def products(x, reverse=False, exclusive=False):
    x = x[::-1] if reverse else x
    found = np.array([product(x[: i + (not exclusive)]) for i in range(len(x))], np.float32)
    return found[::-1] if reverse else found


def states(decay, x, reverse=False, exclusive=False):
    """The loop, and by how much each state may differ: infinity where that cannot be said.

    Terms of both signs may leave the range where their sum does not, and numbers below `TINY` may
    be zeros; a sum of which nothing is left has no sign.
    """
    if reverse:
        found, slack = states(decay[::-1], x[::-1], False, exclusive)
        return found[::-1], slack[::-1]
    state, terms, small, lost = np.float32(0), 0.0, 0.0, False
    found, slack = [], []
    for d, value in zip(decay, x, strict=True):
        after = d * state + value
        if np.isfinite(state):
            unsure = EPSILON * terms + small
            if np.isinf(d) and terms > 0 and abs(state) <= unsure:
                lost = True
            if np.isfinite(d) and np.isfinite(value):
                size = abs(float(d) * float(state) + float(value))
                terms = abs(float(d)) * terms + abs(float(value))
                small = abs(float(d)) * small + TINY * min(max(terms, 1), LOST)
                limit = LARGEST / 16 if np.isfinite(after) else 16 * LARGEST
                lost |= terms + small > limit if np.isfinite(after) else size - small < limit
        slack.append(np.inf if lost else EPSILON * terms + small * (terms > 0))
        found.append(after)
        state = after
    if exclusive:
        found, slack = [np.float32(0), *found[:-1]], [0.0, *slack[:-1]]
    return np.array(found), np.array(slack)


def carried(decay, weight, reverse, exclusive):
    """The gradient of a recurrence's input, and its slack."""
    if exclusive:
        return states(decay, weight, not reverse, True)
    found, slack = states(decay, decay * weight, not reverse, True)
    return weight + found, slack


def times(one, slack, other, more):
    """A product of two numbers that may be off, and by how much it may be."""
    product = one * other
    off = abs(one) * more + abs(other) * slack + slack * more + TINY
    over = (np.isinf(one) & (abs(other) <= more) & (more > 0)) | np.isinf(slack + more)
    over |= np.isinf(other) & (abs(one) <= slack) & (slack > 0)
    finite = np.isfinite(one) & np.isfinite(other)
    over |= (
        finite
        & ~((off < LARGEST / 16) & (abs(product) < LARGEST / 16))
        & ~(np.isinf(product) & (abs(one.astype("f8") * other) - off > 16 * LARGEST))
    )
    return product, np.where(over, np.inf, np.where(finite, off, 0))


def model(decay, x, weight):
    def product(x):
        return md.prod(x, "length")

    def of(function):
        return lambda *operands: md.sum(function(*operands) * weight)

    results = {"prod": product(x)}
    for r, e in FLAGS:
        results[f"cumprod {r} {e}"] = md.cumprod(x, "length", r, e)
        results[f"recurrence {r} {e}"] = md.linear_recurrence(decay, x, "length", r, e)
        slopes = md.grad(
            of(lambda d, x, r=r, e=e: md.linear_recurrence(d, x, "length", r, e)), (0, 1)
        )(decay, x)
        results[f"decay's gradient {r} {e}"], results[f"x's gradient {r} {e}"] = slopes
    results["prod's gradient"] = md.grad(lambda x: md.sum(product(x)))(x)
    results["cumprod's gradient"] = md.grad(of(lambda x: md.cumprod(x, "length")))(x)
    return results


@pytest.fixture(scope="module")
def expected():
    with np.errstate(all="ignore"):
        return _expected()


def _expected():
    results = {"prod": [(product(x), 0.0) for x in X]}
    for r, e in FLAGS:
        results[f"cumprod {r} {e}"] = [(products(x, r, e), np.zeros(LENGTH)) for x in X]
        results[f"recurrence {r} {e}"] = [states(d, x, r, e) for d, x in zip(DECAY, X, strict=True)]
        back = [carried(d, WEIGHT, r, e) for d in DECAY]
        before = [states(d, x, r, True) for d, x in zip(DECAY, X, strict=True)]
        results[f"x's gradient {r} {e}"] = back
        results[f"decay's gradient {r} {e}"] = [
            times(*one, *other) for one, other in zip(back, before, strict=True)
        ]
    zeros = np.zeros(LENGTH)
    results["prod's gradient"] = [
        (np.array([product(np.delete(x, i)) for i in range(LENGTH)]), zeros) for x in X
    ]
    results["cumprod's gradient"] = [
        times(
            products(x, False, True),
            TINY * np.logical_and.accumulate(np.append(1, x[:-1] != 0)),
            *carried(x, WEIGHT, False, False),
        )
        for x in X
    ]
    return {
        name: tuple(np.stack(parts) for parts in zip(*rows, strict=True))
        for name, rows in results.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_values_give_what_the_definition_says(backend, mesh, expected):
    operands = [md.named(v, ["row", "length"]) for v in (DECAY, X)]
    where = {"mesh": mesh, "layout": "length:m"} if mesh else {}
    results = run(model, *operands, md.named(WEIGHT, ["length"]), backend=backend, **where)
    wrong = []
    for name, found in results.items():
        found, (want, slack) = np.asarray(found), expected[name]
        with np.errstate(all="ignore"):
            near = abs(found - want) <= 2e-5 * abs(want) + slack + 4 * TINY
        same = near | (found == want) | (np.isnan(found) & np.isnan(want)) | np.isinf(slack)
        assert np.isinf(slack).mean() < 0.35, name
        for row in np.flatnonzero(~same.reshape(ROWS, -1).all(1))[:3]:
            inputs = [DECAY[row], X[row]] if "prod" not in name else [X[row]]
            wrong.append(f"{name}: {inputs} gives {found[row]} for {want[row]}")
    assert not wrong, "\n".join(wrong)
