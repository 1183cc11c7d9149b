"""Softmax and its kin, over any dims, without overflow.

They subtract the largest element and then sum exponentials. So over a split dim they move one
number per position and reduction, never the operand.
"""

from __future__ import annotations

from meshdsl.ops.elementwise.arithmetic import exp, isfinite, log, stop_gradient, where
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import max, need_float, sum
from meshdsl.tensors.dims import DimsLike
from meshdsl.tensors.tensor import Tensor


@operation
def logsumexp(x: Tensor, over: DimsLike) -> Tensor:
    """Returns log(sum(exp(x))) over some dims, without overflow.

    Raises:
        ValueError: x lacks a dim, or is not floating-point.

    Examples:
        >>> logits = md.named([[0.0, 0.0], [100.0, 100.0]], ["batch", "vocab"])
        >>> print(md.logsumexp(logits, over="vocab"))
        f32[batch=2] [  0.6931 100.6931]
    """
    need_float(x)
    largest = stop_gradient(_finite(max(x, over)))
    return log(sum(exp(x - largest), over)) + largest


@operation
def softmax(x: Tensor, over: DimsLike) -> Tensor:
    """Returns exp(x) divided by its sum over some dims.

    Raises:
        ValueError: x lacks a dim, or is not floating-point.

    Examples:
        >>> logits = md.named([[0.0, 0.0], [1.0, 3.0]], ["batch", "vocab"])
        >>> print(md.softmax(logits, over="vocab"))
        f32[batch=2, vocab=2] [[0.5    0.5   ]
         [0.1192 0.8808]]
    """
    need_float(x)
    scaled = exp(x - stop_gradient(max(x, over)))
    return scaled / sum(scaled, over)


@operation
def log_softmax(x: Tensor, over: DimsLike) -> Tensor:
    """Returns the logarithm of `softmax`.

    Raises:
        ValueError: x lacks a dim, or is not floating-point.

    Examples:
        >>> logits = md.named([[0.0, 0.0], [1.0, 3.0]], ["batch", "vocab"])
        >>> print(md.log_softmax(logits, over="vocab"))
        f32[batch=2, vocab=2] [[-0.6931 -0.6931]
         [-2.1269 -0.1269]]
    """
    return x - logsumexp(x, over)


def _finite(x: Tensor) -> Tensor:
    return where(isfinite(x), x, 0)
