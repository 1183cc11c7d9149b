"""Losses, per position."""

from __future__ import annotations

import meshdsl as md
from meshdsl.dims import DimLike
from meshdsl.dtypes import is_integer, short
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.operation import operation


@operation
def softmax_cross_entropy(
    logits: md.Tensor, labels: md.Tensor, over: DimLike = "vocab"
) -> md.Tensor:
    """Returns -log softmax(logits)[labels], in nats.

    It is written with sums over `over` only, so logits that are split over it stay split: what
    moves is three numbers per position.

    Args:
        logits: [..., over].
        labels: integers [...]; one outside of [0, size of `over`) gives log(sum(exp(logits))).

    Returns:
        [...], float32 or wider.

    Raises:
        ValueError: the logits lack the dim, or the labels have others or are not integers.
    """
    logits = at_least_float32(logits)
    classes = logits.shape.get(over)
    extra = labels.shape.without(logits.shape.without([classes.name]).names)
    problems = [f"the labels have dims {extra} that the logits {logits.shape} lack"] * bool(extra)
    if not is_integer(labels.dtype):
        problems.append(f"the labels are integers, got {short(labels.dtype)}")
    if problems:
        raise ValueError("; ".join(problems))
    chosen = md.one_hot(labels, classes, "bool")
    return md.logsumexp(logits, classes) - md.sum(md.where(chosen, logits, 0), classes)
