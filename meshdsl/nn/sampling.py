"""Sampling: which token comes next, by the scores of all of them.

Guarantees:
    A row's token depends on its own scores and its own noise, not on the other rows. Noise is the
    same on every layout and backend, up to the rounding of logarithms.
"""

from __future__ import annotations

import math

import numpy as np

import meshdsl as md
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike

_BITS = 23  # of float32's mantissa: uniform numbers are odd multiples of 2**-24


@operation
def row_noise(key: md.Tensor, rows: md.Tensor, over: Dimension) -> md.Tensor:
    """Returns Gumbel noise [*rows, over], float32, that depends on the key and a row's number.

    `nn.row_noise(key, rows, vocab)`. A text has the same noise in every batch, if its row has the
    same number. `md.argmax(scores + noise, "vocab")` draws from softmax(scores).

    Args:
        key: one for all rows, or one for each, [*rows, random_key].
        rows: integers, the numbers of the rows. Those that differ by a multiple of
            2**32 / gcd(2**32, over.size) have the same noise.

    Examples:
        >>> key, vocab = md.random.key(0), md.Dimension("vocab", 5)
        >>> two = md.nn.row_noise(key, md.named([3, 7], ["batch"]), vocab)
        >>> one = md.nn.row_noise(key, md.named([7], ["batch"]), vocab)
        >>> print(two.dims, np.array_equal(two.data[1], one.data[0]))
        [batch=2, vocab=5] True
    """
    first = md.cast(rows, "uint32") * np.uint32(over.size)
    numbers = md.outer(md.add, first, md.arange(over, "uint32"))
    drawn = md.index(md.random.fold_in(key, numbers), md.random.KEY, 0)
    uniform = (md.cast(md.shift_right(drawn, 32 - _BITS), "float32") + 0.5) * 2.0**-_BITS
    return -md.log(-md.log(uniform))


@operation
def penalise_seen(scores: md.Tensor, seen: md.Tensor, penalty: md.Tensor | float) -> md.Tensor:
    """Returns scores with those of seen tokens lowered (Keskar et al. 2019, "CTRL", section 4.1).

    `nn.penalise_seen(scores, seen, 1.2)`. Positive scores are divided by the penalty, others are
    multiplied by it.

    Args:
        seen: bool, with dims of the scores.
        penalty: 1 changes nothing. A number, or a tensor: the result is then float32 or wider.

    Examples:
        >>> scores = md.named([2.0, -2.0, 3.0], ["vocab"])
        >>> seen = md.named([True, True, False], ["vocab"])
        >>> print(md.nn.penalise_seen(scores, seen, 2.0))
        f32[vocab=3] [ 1. -4.  3.]
    """
    if isinstance(penalty, md.Tensor):
        scores = at_least_float32(scores)
        penalty = md.cast(penalty, scores.dtype)
    return md.where(seen, md.where(scores > 0, scores / penalty, scores * penalty), scores)


@operation
def sample(
    scores: md.Tensor,
    over: DimLike,
    noise: md.Tensor | None = None,
    temperature: md.Tensor | float = 1.0,
    top_k: md.Tensor | None = None,
    top_p: md.Tensor | None = None,
    min_p: md.Tensor | None = None,
) -> md.Tensor:
    """Returns a position along `over` for each row, as s32.

    `nn.sample(scores, "vocab", nn.row_noise(key, rows, vocab), temperature=0.8)`. The filters apply
    after the temperature, in this order, each to what those before it leave. They keep at least the
    largest score, and all scores that are equal to the least one they keep.

    Args:
        scores: floating-point, [..., over].
        noise: as of `row_noise`. None: the largest score is taken.
        temperature: a number or one for each row. 0 takes the largest score.
        top_k: integers for rows: keep the k largest; 0 keeps all. Scores are sorted while the
            program runs only if some row has a `top_k` above 0 or a `top_p` below 1. None leaves
            the filter out.
        top_p: keep the fewest that together have this probability (Holtzman et al. 2020, "nucleus
            sampling", section 3.1); 1 keeps all.
        min_p: keep those with at least this share of the largest probability (Nguyen et al. 2024,
            section 3); 0 keeps all.

    Examples:
        >>> scores = md.named([[0.0, 1.0, 9.0], [9.0, 1.0, 0.0]], ["batch", "vocab"])
        >>> print(md.nn.sample(scores, "vocab"))  # the largest
        s32[batch=2] [2 0]
        >>> noise = md.nn.row_noise(md.random.key(0), md.arange(scores.dims[0]), scores.dims[1])
        >>> print(md.nn.sample(scores, "vocab", noise, top_k=md.named([1, 1], ["batch"])))
        s32[batch=2] [2 0]
    """
    over = scores.shape.get(over)
    scores = md.cast(scores, "float32") if scores.dtype.itemsize < 4 else scores
    if noise is None:
        return md.argmax(scores, over)
    if not isinstance(temperature, md.Tensor):
        temperature = md.full([], temperature)
    draws = temperature > 0
    scaled = scores / md.cast(md.where(draws, temperature, 1.0), scores.dtype)
    least = []
    if top_k is not None or top_p is not None:
        # Most rows ask for neither: sorting the scores is most of what a step costs beside them.
        no_bound = md.broadcast(
            md.full([], -math.inf, scaled.dtype), scaled.shape.without([over.name])
        )
        least.append(
            md.cond(
                _asked(top_k, top_p),
                lambda: _least_kept(scaled, over, top_k, top_p),
                lambda: no_bound,
            )
        )
    if min_p is not None:
        # The logarithm of 0 is -inf, which keeps all.
        least.append(md.max(scaled, over) + md.log(md.cast(min_p, scaled.dtype)))
    noisy = scaled + md.cast(noise, scaled.dtype)
    for each in least:
        noisy = md.where(scaled >= each, noisy, -math.inf)
    return md.argmax(md.where(draws, noisy, scaled), over)


def _asked(top_k: md.Tensor | None, top_p: md.Tensor | None) -> md.Tensor:
    """Returns whether some row asks for one of the filters, a bool without dims."""
    rows = [top_k > 0] if top_k is not None else []
    rows += [top_p < 1] if top_p is not None else []
    asked, *more = [md.any(each) for each in rows]
    return asked | more[0] if more else asked


def _least_kept(
    scores: md.Tensor, over: Dimension, top_k: md.Tensor | None, top_p: md.Tensor | None
) -> md.Tensor:
    """Returns the least score that both filters keep, for each row."""
    # No layout splits a dim of this name: a row is gathered once, and sorted on its device.
    ranked = Dimension("ranked_scores", over.size)
    falling = md.sort(scores.rename({over.name: ranked.name}), ranked, descending=True)
    rank, lowest = md.arange(ranked), -math.inf
    kept = None
    if top_k is not None:
        count = md.where(top_k > 0, top_k, over.size)
        kept = md.outer(md.less, rank, count) if count.shape else rank < count
        falling = md.where(kept, falling, lowest)
    if top_p is not None:
        before = md.cumsum(md.softmax(falling, ranked), ranked, exclusive=True)
        top_p = md.cast(top_p, before.dtype)
        falling = md.where((before < top_p) | (top_p >= 1), falling, lowest)
    return md.min(md.where(falling > lowest, falling, math.inf), ranked)
