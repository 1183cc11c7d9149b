"""Attention written in the language: what the operation `attention` means.

It is the definition to read and to test against. Second derivatives differentiate it. Its scores
are tensors of the graph, so its memory is quadratic in the length.
"""

from __future__ import annotations

from meshdsl.ops.creation import arange
from meshdsl.ops.elementwise.arithmetic import abs, cast, equal, subtract, tanh, where
from meshdsl.ops.elementwise.broadcasting import outer
from meshdsl.ops.operation import operation
from meshdsl.ops.products.einsum import einsum
from meshdsl.ops.reductions.softmax import softmax
from meshdsl.tensors.dims import DimLike
from meshdsl.tensors.tensor import Tensor

# Scores of at most this are hidden. It is finite, so that no difference of scores is NaN.
HIDDEN = -1e30


@operation
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    over: DimLike = "memory_length",
    causal: bool = False,
    length: DimLike = "length",
    features: DimLike = "kv",
    *,
    window: int | None = None,
    positions: Tensor | int = 0,
    memory_positions: Tensor | None = None,
    segments: Tensor | None = None,
    memory_segments: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns what `md.attention` returns, by its definition; see there for the arguments."""
    memory, contracted = k.shape.get(over), q.shape.get(features)
    queries = q.shape.without([contracted.name])
    values = v.shape.without([memory.name, *queries.names])
    shared = [dim for dim in queries if dim in k.shape]
    own = [dim for dim in queries if dim not in k.shape]
    work = "float64" if q.dtype.name == "float64" else "float32"
    scores = einsum(cast(q, work), cast(k, work), out=[*shared, *own, memory])
    scores = scores * (contracted.size**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + cast(bias, work)
    visible = []
    if causal or window is not None:
        if isinstance(positions, int):
            positions = arange(q.shape.get(length)) + positions
        if memory_positions is None:
            memory_positions = arange(memory)
        behind = outer(subtract, positions, memory_positions)
        if causal:
            visible.append(behind >= 0)
        if window is not None:
            visible.append(abs(behind) < window)
    if segments is not None:
        if memory_segments is None:
            memory_segments = segments.rename(**{q.shape.get(length).name: memory.name})
        visible.append(outer(equal, segments, memory_segments))
    if mask is not None:
        visible.append(mask)
    for seen in visible:
        scores = where(seen, scores, HIDDEN)
    hidden = scores <= HIDDEN
    weights = where(hidden, 0.0, softmax(where(hidden, HIDDEN, scores), memory))
    return cast(einsum(weights, cast(v, work), out=[*queries, *values]), v.dtype)
