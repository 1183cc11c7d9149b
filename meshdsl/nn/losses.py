"""Losses per position, and their mean over those that count."""

from __future__ import annotations

import math

import jax
import numpy as np

import meshdsl as md
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.elementwise.broadcasting import need_dims
from meshdsl.ops.operation import checked_by, operation
from meshdsl.tensors.dims import DimLike, DimsLike, name_of
from meshdsl.tensors.dtypes import is_integer, largest, short
from meshdsl.tensors.named_array import NamedArray


def _check_known(
    logits: md.Tensor,
    labels: md.Tensor,
    over: DimLike = "vocab",
    ignore_label: int | None = None,
) -> None:
    """Raises ValueError if known labels lie outside of the classes."""
    if not isinstance(logits, md.Tensor):  # the operation reports it
        return
    if not isinstance(labels, NamedArray) or not is_integer(labels.dtype):
        return
    classes = logits.dims.find(name_of(over))
    if classes is None:  # the operation reports it
        return
    data = labels.data
    if isinstance(data, jax.core.Tracer) or not getattr(data, "is_fully_addressable", True):
        return
    known = np.asarray(labels)
    wrong = (known < 0) | (known >= classes.size)
    if ignore_label is not None:
        wrong &= known != ignore_label
    if wrong.any():
        at = np.argwhere(wrong)[0]
        place = ", ".join(f"{d.name}={i}" for d, i in zip(labels.dims, at, strict=True))
        first = f", the first at {place}" if place else ""
        raise ValueError(
            f"{wrong.sum()} of {wrong.size} labels are outside of the classes 0 to "
            f"{classes.size - 1}{first}; give ignore_label=... for those that are to be left out"
        )


@checked_by(_check_known)
@operation
def softmax_cross_entropy(
    logits: md.Tensor,
    labels: md.Tensor,
    over: DimLike = "vocab",
    ignore_label: int | None = None,
) -> md.Tensor:
    """Returns -log softmax(logits)[labels], in nats.

    `nn.softmax_cross_entropy(logits, labels, over="vocab")`; of padded labels, the mean loss is

        losses = nn.softmax_cross_entropy(logits, labels, ignore_label=-1)
        loss = nn.mean_where(losses, labels != -1)

    It uses sums over `over` only. So logits that are split over it stay split, and only three
    numbers per position are sent.

    Args:
        logits: [..., over].
        labels: integers [...], from 0 to the size of `over` - 1.
        ignore_label: positions with this label have loss 0 and no gradient (NaN where logits are
            NaN). It may be one of the classes, or none.

    Returns:
        [...], float32 or wider. In a traced function the labels are known only when it runs: a
        label outside of the classes has the loss NaN and the gradient NaN. A mask that leaves out
        its loss leaves out its gradient too.

    Raises:
        ValueError: the logits lack the dim; the labels have other dims or are not integers; or a
            known label is outside of the classes.

    Examples:
        >>> logits = md.zeros(md.dims(batch=2, vocab=4))
        >>> labels = md.named([3, -1], ["batch"])
        >>> losses = md.nn.softmax_cross_entropy(logits, labels, ignore_label=-1)
        >>> print(losses, np.log(4.0).round(3))
        f32[batch=2] [1.3863 0.    ] 1.386
    """
    logits = at_least_float32(logits)
    classes = logits.shape.get(over)
    extra = labels.shape.without(logits.shape.without([classes.name]).names)
    problems = [f"the labels have dims {extra} that the logits {logits.shape} lack"] * bool(extra)
    if not is_integer(labels.dtype):
        problems.append(f"the labels are integers, got {short(labels.dtype)}")
    for dim in labels.shape:
        other = logits.shape.find(dim.name)
        if other is not None and other.size != dim.size:
            sizes = f"size {other.size} in the logits but {dim.size} in the labels"
            problems.append(f"dim `{dim.name}` has {sizes}")
    if ignore_label is not None and not isinstance(ignore_label, (int, np.integer)):
        problems.append(f"ignore_label is an integer, got {ignore_label!r}")
    if problems:
        raise ValueError("; ".join(problems))
    if labels.dtype.itemsize < 4:  # too narrow to compare with the number of classes
        labels = md.cast(labels, "int32")
    fits = (labels >= 0) & (labels < classes.size)
    limits = np.iinfo(labels.dtype)
    if ignore_label is not None and not limits.min <= ignore_label <= limits.max:
        ignore_label = None  # the labels' dtype does not hold it, so no label equals it
    if ignore_label is not None:
        fits = fits | (labels == ignore_label)
    chosen = md.one_hot(labels, classes, "bool")
    total = md.logsumexp(logits, classes)
    total = md.where(fits, total, _nan_like(total, fits))
    each = total - md.sum(md.where(chosen, logits, 0), classes)
    return each if ignore_label is None else md.where(labels == ignore_label, 0, each)


def _nan_like(x: md.Tensor, fits: md.Tensor) -> md.Tensor:
    """Returns NaN where `fits` is false; its gradient is NaN for every cotangent but 0.

    NaN as a factor would turn a masked position's cotangent of 0 into NaN too. Here the cotangent
    arrives on two ways: any but 0 becomes plus and minus infinity on them, whose sum is NaN.
    """
    huge = md.where(fits, md.full([], 1, x.dtype), largest(x.dtype))
    return x * huge * huge - x * huge * huge + math.nan


@operation
def mean_where(x: md.Tensor, mask: md.Tensor, over: DimsLike | None = None) -> md.Tensor:
    """Returns the mean of x over the places where a mask is true; 0 where there are none.

    `nn.mean_where(losses, labels != -1)`. In microbatches, each divides by its own count. Sums and
    counts are in float32 or wider; the mean has x's dtype.

    Args:
        x: floating-point, [...].
        mask: bool, any dims of x.
        over: the dims to take the mean over, by default all.

    Examples:
        >>> losses = md.named([[1.0, 2.0], [6.0, 100.0]], ["batch", "length"])
        >>> labels = md.named([[5, 7], [2, -1]], ["batch", "length"])
        >>> print(md.nn.mean_where(losses, labels != -1))
        f32[] 3.
        >>> print(md.nn.mean_where(losses, labels != -1, over="length"))
        f32[batch=2] [1.5 6. ]
    """
    need_dims(mask, "the mask", x, "x", "broadcast x first: md.broadcast(x, dims)")
    wide = at_least_float32(x)
    count = md.sum(md.cast(md.broadcast(mask, x.shape), wide.dtype), over)
    return md.cast(md.sum(md.where(mask, wide, 0), over) / md.maximum(count, 1), x.dtype)
