"""Activation functions of neural networks, written in the language."""

from __future__ import annotations

import math
from typing import Any

from meshdsl.ops.elementwise.arithmetic import abs, clip, expm1, logaddexp, sigmoid, tanh, where
from meshdsl.ops.elementwise.special import erf
from meshdsl.ops.operation import operation
from meshdsl.tensors.tensor import Tensor

__all__ = [
    "celu",
    "elu",
    "gelu",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "leaky_relu",
    "log_sigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "silu",
    "softplus",
    "softsign",
]


@operation
def relu(x: Tensor) -> Tensor:
    """Returns max(x, 0), with slope 0 at 0.

    Examples:
        >>> x = md.named([-2.0, 0.0, 3.0], ["feature"])
        >>> print(md.relu(x))
        f32[feature=3] [0. 0. 3.]
    """
    return where(x <= 0, 0, x)  # NaN stays


@operation
def relu6(x: Tensor) -> Tensor:
    """Returns min(max(x, 0), 6), with slope 0 at 0 and 6.

    Examples:
        >>> x = md.named([-2.0, 3.0, 8.0], ["feature"])
        >>> print(md.relu6(x))
        f32[feature=3] [0. 3. 6.]
    """
    return where(x <= 0, 0, where(x >= 6, 6, x))


@operation
def leaky_relu(x: Tensor, slope: Any = 0.01) -> Tensor:
    """Returns x where it is positive, else slope * x; `slope` is a number or a tensor.

    Examples:
        >>> x = md.named([[-2.0, 3.0], [-4.0, 5.0]], ["batch", "feature"])
        >>> print(md.leaky_relu(x, 0.5))
        f32[batch=2, feature=2] [[-1.  3.]
         [-2.  5.]]
        >>> print(md.leaky_relu(x, md.named([0.5, 0.25], ["batch"])))
        f32[batch=2, feature=2] [[-1.  3.]
         [-1.  5.]]
    """
    return where(x > 0, x, slope * x)


@operation
def elu(x: Tensor, alpha: Any = 1.0) -> Tensor:
    """Returns x where it is positive, else alpha * (exp(x) - 1) (Clevert et al. 2015).

    Examples:
        >>> x = md.named([-100.0, -1.0, 3.0], ["feature"])
        >>> print(md.elu(x))
        f32[feature=3] [-1.     -0.6321  3.    ]
    """
    return where(x > 0, x, alpha * expm1(where(x > 0, 0, x)))


@operation
def celu(x: Tensor, alpha: Any = 1.0) -> Tensor:
    """Returns x where it is positive, else alpha * (exp(x / alpha) - 1) (Barron 2017).

    Examples:
        >>> x = md.named([-100.0, -1.0, 3.0], ["feature"])
        >>> print(md.celu(x, alpha=2.0))
        f32[feature=3] [-2.     -0.7869  3.    ]
    """
    return where(x > 0, x, alpha * expm1(where(x > 0, 0, x) / alpha))


@operation
def selu(x: Tensor) -> Tensor:
    """Returns the self-normalising unit: a scaled `elu` (Klambauer et al. 2017, section 2).

    Examples:
        >>> x = md.named([-100.0, 0.0, 1.0], ["feature"])
        >>> print(md.selu(x))
        f32[feature=3] [-1.7581  0.      1.0507]
    """
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


@operation
def gelu(x: Tensor, approximate: bool = True) -> Tensor:
    """Returns the Gaussian error linear unit (Hendrycks and Gimpel 2016, section 2).

    In its tanh form, or with `approximate=False` as x times the normal distribution function.

    Examples:
        >>> x = md.named([-1.0, 0.0, 1.0], ["feature"])
        >>> print(md.gelu(x))
        f32[feature=3] [-0.1588  0.      0.8412]
        >>> print(md.gelu(x, approximate=False))
        f32[feature=3] [-0.1587  0.      0.8413]
    """
    if not approximate:
        return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + tanh(inner))


@operation
def silu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(x).

    Examples:
        >>> x = md.named([-1.0, 0.0, 1.0], ["feature"])
        >>> print(md.silu(x))
        f32[feature=3] [-0.2689  0.      0.7311]
    """
    return x * sigmoid(x)


@operation
def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)) without overflow.

    Examples:
        >>> x = md.named([-1.0, 0.0, 100.0], ["feature"])
        >>> print(md.softplus(x))
        f32[feature=3] [  0.3133   0.6931 100.    ]
    """
    return logaddexp(x, 0)


@operation
def log_sigmoid(x: Tensor) -> Tensor:
    """Returns log(sigmoid(x)) without overflow.

    Examples:
        >>> x = md.named([-100.0, 0.0, 1.0], ["feature"])
        >>> print(md.log_sigmoid(x))
        f32[feature=3] [-100.       -0.6931   -0.3133]
    """
    return -softplus(-x)


@operation
def mish(x: Tensor) -> Tensor:
    """Returns x * tanh(softplus(x)) (Misra 2019).

    Examples:
        >>> x = md.named([-1.0, 0.0, 1.0], ["feature"])
        >>> print(md.mish(x))
        f32[feature=3] [-0.3034  0.      0.8651]
    """
    return x * tanh(softplus(x))


@operation
def softsign(x: Tensor) -> Tensor:
    """Returns x / (1 + abs(x)).

    Examples:
        >>> x = md.named([-3.0, 0.0, 1.0], ["feature"])
        >>> print(md.softsign(x))
        f32[feature=3] [-0.75  0.    0.5 ]
    """
    return x / (1 + abs(x))


@operation
def hard_tanh(x: Tensor) -> Tensor:
    """Returns x limited to [-1, 1].

    Examples:
        >>> x = md.named([-3.0, 0.5, 2.0], ["feature"])
        >>> print(md.hard_tanh(x))
        f32[feature=3] [-1.   0.5  1. ]
    """
    return clip(x, -1, 1)


@operation
def hard_sigmoid(x: Tensor) -> Tensor:
    """Returns x / 6 + 1/2 limited to [0, 1].

    Examples:
        >>> x = md.named([-4.0, 0.0, 1.5], ["feature"])
        >>> print(md.hard_sigmoid(x))
        f32[feature=3] [0.   0.5  0.75]
    """
    return relu6(x + 3) / 6


@operation
def hard_silu(x: Tensor) -> Tensor:
    """Returns x * hard_sigmoid(x).

    Examples:
        >>> x = md.named([-1.0, 0.0, 1.5], ["feature"])
        >>> print(md.hard_silu(x))
        f32[feature=3] [-0.3333  0.      1.125 ]
    """
    return x * hard_sigmoid(x)
