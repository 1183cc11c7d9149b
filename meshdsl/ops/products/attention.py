"""Dot-product attention as one operation, whose scores never become a tensor of the graph.

Besides its result, the primitive gives the log-sum-exp of each row of scores. Its gradient is a
primitive too, which recomputes the scores from that (Dao et al. 2022, "FlashAttention"). So memory
is linear in the length on every backend. Second derivatives use `attention_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.gradients.replay import Cotangents, Replay
from meshdsl.ops.control.body import subgraph
from meshdsl.ops.creation import arange, zeros
from meshdsl.ops.operation import operation
from meshdsl.ops.products.attention_reference import attention_reference
from meshdsl.tensors.dims import Dimension, DimLike, Shape
from meshdsl.tensors.dtypes import is_float, is_integer, short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind

# Operands after queries, keys and values, in this order.
MASKS = ("positions", "memory_positions", "segments", "memory_segments", "mask", "bias")


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    q, _, v = inputs[:3]
    queries = q.shape.without([params["features"]])
    values = v.shape.without([params["memory"], *queries.names])
    return [(Shape([*queries, *values]), v.dtype), (queries, _wide(q.dtype))]


def _gradient_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    wanted = [*inputs[:3]]
    if params["bias_gradient"]:
        wanted.append(inputs[3 + params["given"].index("bias")])
    return [(t.shape, t.dtype) for t in wanted]


def _wide(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.itemsize >= 4 else np.dtype("float32")


def _gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> Cotangents:
    # Only the gradient reads the log-sum-exp, and `_second` passes all of its derivative to the
    # operands. So its cotangent is None here, or zeros where a loop replaced None.
    arriving, _ = cotangents
    if arriving is None:
        return [None] * len(op.inputs)
    given: tuple[str, ...] = op.params["given"]
    to_bias = "bias" in given and wanted[3 + given.index("bias")]
    inputs = (*op.inputs, *op.outputs, arriving)
    gradients = bind(ATTENTION_GRADIENT, inputs, {**op.params, "bias_gradient": to_bias}).outputs
    masks = [gradients[3] if name == "bias" and to_bias else None for name in given]
    return [*gradients[:3], *masks]


def _second(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> Cotangents:
    """Pulls back through the gradient of the reference, as a function of operands and cotangent.

    The gradient also reads the result and the sums. There, they are functions of the operands.
    """
    *operands, _, _, arriving = op.inputs
    first = [True] * 3 + [
        name == "bias" and op.params["bias_gradient"] for name in op.params["given"]
    ]

    def pullback(*tensors: Tensor) -> list[Tensor]:
        *inner, cotangent = tensors
        graph, consts, _ = subgraph(lambda *given: _reference(given, op.params), inner)
        replayed = Replay(graph, [*consts, *inner], [*[False] * len(consts), *first])
        gradients = replayed.backward([cotangent])[len(consts) :]
        return [
            zeros(t.shape, t.dtype) if g is None else g
            for g, t, on in zip(gradients, inner, first, strict=True)
            if on
        ]

    graph, consts, _ = subgraph(pullback, [*operands, arriving])
    active = [*[False] * len(consts), *wanted[: len(operands)], wanted[-1]]
    replayed = Replay(graph, [*consts, *operands, arriving], active)
    gradients = replayed.backward(list(cotangents))[len(consts) :]
    return [*gradients[:-1], None, None, gradients[-1]]


def _reference(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> Tensor:
    q, k, v, *rest = inputs
    named = ("causal", "length", "features", "window", "soft_cap", "scale")
    options: dict[str, Any] = {name: params[name] for name in named}
    options |= {"positions": params["offset"], **dict(zip(params["given"], rest, strict=True))}
    return attention_reference(q, k, v, params["memory"], **options)


ATTENTION = Primitive("attention", _rule, _gradient, for_gradient=(1,))
ATTENTION_GRADIENT = Primitive("attention_gradient", _gradient_rule, _second)


def _check_features(q: Tensor, features: DimLike) -> None:
    """Raises ValueError unless the queries have the dim that is contracted with the keys."""
    if q.shape.find(features if isinstance(features, str) else features.name) is None:
        raise ValueError(
            f"the queries {q.shape} have no dim `{features}` to contract with the keys; features= "
            "names it (by default `kv`), as in md.attention(q, k, v, features='dim')"
        )


@operation
def attention(
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
    """Returns softmax(scale q k) v over the dim `over` (Vaswani et al. 2017, equation 1).

    `md.attention(q, k, v, over="memory_length", causal=True)`. Dims that queries and keys share
    (batch, heads) are attended one by one. Dims that only the queries have share keys and values:
    with q.split("heads", [heads, group]) and as many heads of keys, this is grouped-query attention
    (Ainslie et al. 2023). Scores and weights are computed in float32 or wider, and memory is linear
    in the lengths. A query that sees nothing gets zeros.

    Args:
        q: [..., length, features].
        k: [..., over, features], with no other dims than q.
        v: [..., over, value features].
        over: the dim of the positions attended to.
        causal: hides the positions of `over` that are later than that of the query.
        length: the dim of the queries' positions.
        features: the dim contracted between queries and keys.
        window: hides what is `window` positions away or more, on either side.
        positions: of the queries, for `causal` and `window`: [length] and any dims of q, or the
            number of the first one. For queries that are the last of the memory:
            `positions=memory.size - length.size`.
        memory_positions: of the memory, 0, 1, ... by default: [over] and any dims of q.
        segments: integers, [length] and any dims of q; a query sees the memory of its own segment.
        memory_segments: [over] and any dims of q; by default, `segments` along `over`.
        mask: bool, any dims of q and `over`; what is False is hidden.
        bias: added to the scores after the soft cap, any dims of q and `over`; -1e30 and less hide.
        soft_cap: scores s become soft_cap tanh(s / soft_cap) (Gemma 2, 2024, section 2).
        scale: of the scores; 1 / sqrt(features) by default.

    Returns:
        The dims of q, with the value features for `features`.

    Raises:
        ValueError: a dim is missing, k, v or a mask has one that q lacks, or dtypes do not fit.

    Examples:
        >>> q = md.named([[1.0], [1.0]], ["length", "kv"])
        >>> k = md.named([[0.0], [0.0]], ["memory_length", "kv"])
        >>> v = md.named([[2.0], [4.0]], ["memory_length", "kv"])
        >>> print(md.attention(q, k, v, over="memory_length", causal=True))
        f32[length=2, kv=1] [[2.]
         [3.]]
    """
    _check_features(q, features)
    memory, contracted = k.shape.get(over), q.shape.get(features)
    k.shape.get(contracted)
    v.shape.get(memory)
    queries = q.shape.without([contracted.name])
    _check(q, k, v, queries, memory, contracted)
    if segments is not None and memory_segments is None:
        memory_segments = _along(segments, q.shape.get(length), memory)
    elif memory_segments is not None and segments is None:
        raise ValueError("memory_segments need the segments of the queries")
    _check_numbers(window, soft_cap)
    rows = _rows(queries, k, v, length)
    moves = causal or window is not None
    if moves and isinstance(positions, int) and q.shape.get(length).name != rows:
        positions = arange(q.shape.get(length)) + positions
    values: dict[str, Tensor | None] = {
        "positions": positions if isinstance(positions, Tensor) and moves else None,
        "memory_positions": memory_positions if moves else None,
        "segments": segments,
        "memory_segments": memory_segments,
        "mask": mask,
        "bias": bias,
    }
    masks = {name: value for name, value in values.items() if value is not None}
    for name, value in masks.items():
        _check_mask(name, value, queries, memory)
    params = {
        "memory": memory.name,
        "features": contracted.name,
        "length": rows,
        "causal": bool(causal),
        "window": window,
        "offset": positions if isinstance(positions, int) and moves else 0,
        "soft_cap": None if soft_cap is None else float(soft_cap),
        "scale": float(contracted.size**-0.5 if scale is None else scale),
        "given": tuple(masks),
    }
    return bind(ATTENTION, (q, k, v, *masks.values()), params).outputs[0]


def _check_numbers(window: int | None, soft_cap: float | None) -> None:
    if isinstance(window, bool) or (window is not None and window < 1):
        raise ValueError(f"a window is a number of positions, at least 1; got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")


def _check(
    q: Tensor, k: Tensor, v: Tensor, queries: Shape, memory: Dimension, contracted: Dimension
) -> None:
    if not (is_float(q.dtype) and q.dtype == k.dtype == v.dtype):
        dtypes = ", ".join(short(t.dtype) for t in (q, k, v))
        raise ValueError(f"queries, keys and values need one floating-point dtype, got {dtypes}")
    if q.shape.find(memory.name) is not None:
        name = memory.name
        raise ValueError(
            f"the queries have the dim `{name}` that is attended over too; rename it in keys and "
            f"values, as in k.rename({name}='memory_{name}')"
        )
    extra = k.shape.without([contracted.name, memory.name, *q.shape.names])
    if extra:
        raise ValueError(f"the keys have dims {extra} that the queries {q.shape} lack")
    for tensor in (k, v):
        for dim in tensor.shape.without([memory.name, contracted.name]):
            if q.shape.find(dim.name) is not None:
                q.shape.get(dim)  # of one size


def _check_mask(name: str, mask: Tensor, queries: Shape, memory: Dimension) -> None:
    if name == "bias":
        fits, kind = is_float(mask.dtype), "floating-point numbers"
    elif name == "mask":
        fits, kind = mask.dtype == np.bool_, "bool"
    else:
        fits, kind = is_integer(mask.dtype), "integers"
    if not fits:
        raise ValueError(f"`{name}` must be {kind}, got {mask}")
    may = queries if name in ("positions", "segments") else Shape([*queries, memory])
    extra = mask.shape.without(may.names)
    if extra:
        raise ValueError(f"`{name}` has dims {extra} that are not among {may}")
    for dim in mask.shape:
        may.get(dim)


def _along(segments: Tensor, length: Dimension, memory: Dimension) -> Tensor:
    """Returns the segments of the queries under the memory's dim."""
    segments.shape.get(length)
    if length.size != memory.size:
        raise ValueError(f"with {length} and {memory}, the memory needs memory_segments of its own")
    return segments.rename(**{length.name: memory.name})


def _rows(queries: Shape, k: Tensor, v: Tensor, length: DimLike) -> str:
    """Returns the dim of the queries along which they share keys and values, if there is one."""
    own = queries.without([*k.shape.names, *v.shape.names])
    name = length if isinstance(length, str) else length.name
    if own.find(name) is not None or not own:
        return name if own else ""
    return max(own, key=lambda dim: dim.size).name
