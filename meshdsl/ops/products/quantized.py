"""Quantized products: einsums and grouped products of numbers of 8 bits, and their gradients.

An operand x becomes q = round(x / scale), in int8 or in a float of 8 bits. Its scale comes from the
largest |x| along the dims that the product sums over (one scale per channel), or of all of x. So
lowering needs a maximum over exactly the axes that split these dims: an all_reduce that `explain`
shows. A stored weight is quantized where it is stored, and gathered in 8 bits.

Scales are rounded up to powers of two by default. Then a division by a scale, and a multiplication
with it, rounds nothing. All layouts have the same q in any case, since a maximum rounds nothing.

The gradient is straight-through (Bengio et al. 2013, "Estimating or propagating gradients through
stochastic neurons"): the one of the product without rounding, computed in 8 bits. The backward pass
uses the q of the forward pass. It sums over other dims, along which the scale of an operand may
differ: such a scale multiplies the cotangent, and then the cotangent is quantized. So does qwix
(`qwix/_src/core/dot_general_qt.py`).

Each group of a grouped product has scales of its own, which rows look up as they do its matrix. If
the product also sums over rows, all groups share their scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshdsl.ops.elementwise.arithmetic import abs, cast, power_of_two, round, stop_gradient, where
from meshdsl.ops.indexing import take
from meshdsl.ops.products.einsum import EINSUM
from meshdsl.ops.products.grouped import GROUPED_EINSUM, GROUPED_OUTER
from meshdsl.ops.reductions.reduction import max
from meshdsl.ops.shapes.shape import broadcast
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import BFLOAT16, is_float, largest, short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Form, Operation, Primitive, Work
from meshdsl.tracing.trace import bind_one

_FLOAT32, _INT8, _INT32 = np.dtype("float32"), np.dtype("int8"), np.dtype("int32")
# The least normal number of float32 and bfloat16: its inverse is finite. Devices may flush smaller
# numbers to 0.
_LEAST_SCALE = 2.0**-126
# Up to so many products of int8, whose sum float32 holds exactly: 2^24 / 127^2. Devices add up in
# int32, which holds any sum of 133,000 terms; of more, unless nearly all are large and of one sign.
_EXACT_TERMS = 1040


@dataclass(frozen=True)
class EightBits:
    """How products are computed in 8 bits.

    Attributes:
        forward: the dtype of the operands of products.
        gradient: the dtype of the cotangents that are multiplied with these.
        per_tensor: whether an operand has one scale, instead of one per channel.
        rounded: whether scales are powers of two.
    """

    forward: np.dtype
    gradient: np.dtype
    per_tensor: bool = False
    rounded: bool = True


@dataclass(frozen=True)
class Groups:
    """What makes a product of x and w a grouped one.

    Attributes:
        dim: the dim of w that counts the groups.
        group: the group of each row.
    """

    dim: str
    group: Tensor

    def looked_up(self, scale: Tensor) -> Tensor:
        """Returns the scale of each row's group."""
        return take(scale, self.group, self.dim) if scale.shape.find(self.dim) else scale


class _Quantized(NamedTuple):
    """An operand of a product: q * scale. The scale has some of the operand's dims."""

    q: Tensor
    scale: Tensor


def quantized_einsum(
    x: Tensor, y: Tensor, out: Shape, how: EightBits, groups: Groups | None = None
) -> Tensor:
    """Returns the einsum of two tensors, computed in 8 bits; its dtype is that of the operands.

    A product that sums over no dim is computed as it is: there is nothing to gain.

        quantized_einsum(x, w, Shape([batch, d_ff]), EightBits(int8, int8))

    Args:
        groups: of a grouped product, as `md.grouped_einsum` computes it.

    Raises:
        ValueError: the operands are not floating-point.
    """
    problems = [str(t) for t in (x, y) if not is_float(t.dtype)]
    if problems:
        raise ValueError(f"8 bits are for floating-point tensors, not for {', '.join(problems)}")
    group = [] if groups is None else [groups.group]
    summed = _summed((x, y), out, groups)
    if not summed:
        return _product(x, y, out, groups)
    sums_rows = groups is not None and not {*groups.group.shape.names}.isdisjoint(summed)
    of_y = [*summed, groups.dim] if groups is not None and sums_rows else summed
    qx, qy = _quantized(x, summed, how.forward, how), _quantized(y, of_y, how.forward, how)
    terms = math.prod(dim.size for dim in _union(x, y) if dim.name in summed)
    exactly = groups is None and how.forward == _INT8 and terms > _EXACT_TERMS
    scales = [qx.scale, qy.scale if groups is None else groups.looked_up(qy.scale)]
    z = _scaled(qx.q, qy.q, out, x.dtype, scales, how, groups, exactly)
    # The backward pass reads the scales through marks, so that a second gradient is refused.
    marked = [bind_one(ONCE, (t, q.scale)) for t, q in ((x, qx), (y, qy))]
    params = {"how": how, "dim": None if groups is None else groups.dim}
    return bind_one(QUANTIZED, (x, y, qx.q, qy.q, *marked, *group, z), params)


def _summed(operands: Sequence[Tensor], out: Shape, groups: Groups | None) -> list[str]:
    """Returns the names of the dims that a product sums over."""
    if groups is not None:
        operands = (*operands, groups.group)
    names = dict.fromkeys(name for t in operands for name in t.shape.names)
    counted = None if groups is None else groups.dim
    return [name for name in names if out.find(name) is None and name != counted]


def _product(
    x: Tensor, y: Tensor, out: Shape, groups: Groups | None, dtype: np.dtype | None = None
) -> Tensor:
    """Returns the product of two tensors; the one that has the groups is the result or y."""
    params: dict[str, Any] = {"out": out} if dtype is None else {"out": out, "dtype": dtype}
    if groups is None:
        return bind_one(EINSUM, (x, y), params)
    primitive = GROUPED_OUTER if out.find(groups.dim) else GROUPED_EINSUM
    return bind_one(primitive, (x, y, groups.group), {**params, "dim": groups.dim})


def _quantized(x: Tensor, summed: Sequence[str], dtype: np.dtype, how: EightBits) -> _Quantized:
    """Returns a tensor in 8 bits."""
    x = stop_gradient(x)
    over = x.shape.names if how.per_tensor else [n for n in summed if x.shape.find(n) is not None]
    most = cast(max(abs(x), over), _FLOAT32) if over else cast(abs(x), _FLOAT32)
    scale = _scale(most, dtype, how.rounded)
    if _holds_scales(x.dtype, how):
        scaled = x * cast(1 / scale, x.dtype)
    else:
        scaled = cast(x, _FLOAT32) / scale
    return _Quantized(cast(round(scaled) if dtype == _INT8 else scaled, dtype), scale)


def _scale(most: Tensor, dtype: np.dtype, rounded: bool) -> Tensor:
    """Returns the scale for numbers up to `most`: the least one, or the least power of two."""
    bound = 127.0 if dtype == _INT8 else largest(dtype)
    if rounded:
        power = 2.0 ** math.floor(math.log2(bound))
        below = power_of_two(most)
        scale = below * where(most > below * (bound / power), 2 / power, 1 / power)
    else:
        scale = most / bound
    return where(scale < _LEAST_SCALE, 1.0, scale)


def _scaled(
    qx: Tensor,
    qy: Tensor,
    out: Shape,
    dtype: np.dtype,
    scales: Sequence[Tensor],
    how: EightBits,
    groups: Groups | None,
    exactly: bool = False,
) -> Tensor:
    """Returns a product in 8 bits, times some scales.

    Args:
        exactly: whether int8 is added up in int32, also between devices, however many terms there
            are. Else devices add up partial sums in a float, so that several products can share one
            reduction.
    """
    sums = BFLOAT16 if dtype == BFLOAT16 else _INT32 if exactly else _FLOAT32
    z = _product(qx, qy, out, groups, sums)
    multiplied = BFLOAT16 if sums == BFLOAT16 and how.rounded else _FLOAT32
    z = cast(z, multiplied)
    for scale in scales:
        z = z * cast(scale, multiplied)
    return cast(z, dtype)


def _holds_scales(dtype: np.dtype, how: EightBits) -> bool:
    """Whether a multiplication with a scale, or with its inverse, rounds no number of a dtype."""
    return how.rounded and dtype in (BFLOAT16, _FLOAT32)


def _union(x: Tensor, y: Tensor) -> Shape:
    return Shape({dim.name: dim for t in (x, y) for dim in t.shape}.values())


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(inputs[-1].shape, inputs[-1].dtype)]


def _gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor | None]:
    x, y, qx, qy, x_scale, y_scale, *group, _ = op.inputs
    how, (cotangent,) = op.params["how"], cotangents
    groups = Groups(op.params["dim"], *group) if group else None
    rows = (x, y, _Quantized(qy, y_scale)), (y, x, _Quantized(qx, x_scale))
    gradients = [
        _pulled(cotangent, mine, other, quantized, how, groups) if want else None
        for (mine, other, quantized), want in zip(rows, wanted, strict=False)
    ]
    return [*gradients, *(None for _ in op.inputs[2:])]


def _pulled(
    cotangent: Tensor,
    mine: Tensor,
    other: Tensor,
    quantized: _Quantized,
    how: EightBits,
    groups: Groups | None,
) -> Tensor:
    """Returns the cotangent of an operand: that of the product times the other operand."""
    known = {*cotangent.shape.names, *other.shape.names}
    if groups is not None:
        known |= {*groups.group.shape.names, groups.dim}
    out = Shape(dim for dim in mine.shape if dim.name in known)
    summed = _summed((cotangent, other), out, groups)
    if not summed:  # `quantized_einsum` computes such products as they are
        return broadcast(_product(cotangent, other, out, groups), mine.shape)
    q, scale = quantized
    scale = scale if groups is None else groups.looked_up(scale)
    scaled, scales = stop_gradient(cotangent), [scale]
    if any(name in summed for name in scale.shape.names):
        if not _holds_scales(scaled.dtype, how):
            scaled = cast(scaled, _FLOAT32)
        scaled, scales = scaled * cast(scale, scaled.dtype), []
    own = _quantized(scaled, summed, how.gradient, how)
    z = _scaled(own.q, q, out, mine.dtype, [own.scale, *scales], how, groups)
    return broadcast(bind_one(ONCE, (cotangent, scale, z)), mine.shape)


def _no_second_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    raise ValueError(
        "products in 8 bits have a first gradient in reverse mode only; a second one, or md.jvp, "
        f"needs more{op.source.at}. Leave such products as they are, by a rule of precision such "
        f"as `mlp:-` (the result is {short(op.outputs[0].dtype)}{op.outputs[0].shape})"
    )


QUANTIZED = Primitive("quantized", _rule, _gradient, work=Work.NONE, form=Form.SAME, mark=True)
ONCE = Primitive(
    "once_differentiable",
    _rule,
    _no_second_gradient,
    work=Work.NONE,
    form=Form.SAME,
    mark=True,
)
