"""Dot-product attention over named dims."""

from __future__ import annotations

import meshdsl as md
from meshdsl.dims import DimLike
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.operation import operation

# Far below any score, yet finite: a row without visible positions gives equal weights, not NaN.
HIDDEN = -1e30


@operation
def attention(
    q: md.Tensor,
    k: md.Tensor,
    v: md.Tensor,
    over: DimLike = "memory_length",
    causal: bool = False,
    length: DimLike = "length",
    features: DimLike = "kv",
) -> md.Tensor:
    """Returns softmax(q k / sqrt(features)) v (Vaswani et al. 2017, equation 1).

    Dims that queries and keys share (batch, heads) are attended one by one. Dims that only the
    queries have share keys and values: with a dim `group` this is grouped-query attention (Ainslie
    et al. 2023). Weights are computed in float32 or wider.

    Args:
        q: [..., length, features].
        k: [..., over, features], with no other dims than q.
        v: [..., over, value features].
        over: the dim of the positions attended to.
        causal: hides the positions of `over` that are later than that of `length`.
        length: the dim of the positions that attend; used when causal.
        features: the dim contracted between queries and keys.

    Returns:
        The dims of q, with the value features for `features`.

    Raises:
        ValueError: a dim is missing, or k or v has one that q lacks.
    """
    memory, contracted = k.shape.get(over), q.shape.get(features)
    k.shape.get(contracted)
    queries = q.shape.without([contracted.name])
    keys = k.shape.without([contracted.name, memory.name])
    values = v.shape.without([v.shape.get(memory).name])
    extra = keys.without(q.shape.names)
    if extra:
        raise ValueError(f"the keys have dims {extra} that the queries {q.shape} lack")
    shared = [dim for dim in queries if dim in keys]
    own = queries.without([dim.name for dim in shared])
    scores = at_least_float32(md.einsum(q, k, out=[*shared, *own, memory]))
    scores = scores * contracted.size**-0.5
    if causal:
        visible = md.arange(q.shape.get(length)) >= md.arange(memory)
        scores = md.where(visible, scores, HIDDEN)
    weights = md.cast(md.softmax(scores, memory), v.dtype)
    return md.einsum(weights, v, out=[*queries, *values.without(queries.names)])
