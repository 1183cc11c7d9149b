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
    """Returns max(x, 0), with slope 0 at 0. `md.relu(x)`."""
    return where(x <= 0, 0, x)  # NaN stays


@operation
def relu6(x: Tensor) -> Tensor:
    """Returns min(max(x, 0), 6), with slope 0 at 0 and 6. `md.relu6(x)`."""
    return where(x <= 0, 0, where(x >= 6, 6, x))


@operation
def leaky_relu(x: Tensor, slope: Any = 0.01) -> Tensor:
    """Returns x where it is positive, else slope * x; `slope` is a number or a tensor.

    `md.leaky_relu(x)`.
    """
    return where(x > 0, x, slope * x)


@operation
def elu(x: Tensor, alpha: Any = 1.0) -> Tensor:
    """Returns x where it is positive, else alpha * (exp(x) - 1) (Clevert et al. 2015).

    `md.elu(x)`.
    """
    return where(x > 0, x, alpha * expm1(where(x > 0, 0, x)))


@operation
def celu(x: Tensor, alpha: Any = 1.0) -> Tensor:
    """Returns x where it is positive, else alpha * (exp(x / alpha) - 1) (Barron 2017).

    `md.celu(x)`.
    """
    return where(x > 0, x, alpha * expm1(where(x > 0, 0, x) / alpha))


@operation
def selu(x: Tensor) -> Tensor:
    """Returns the self-normalising unit: a scaled `elu` (Klambauer et al. 2017, section 2).

    `md.selu(x)`.
    """
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


@operation
def gelu(x: Tensor, approximate: bool = True) -> Tensor:
    """Returns the Gaussian error linear unit (Hendrycks and Gimpel 2016, section 2).

    `md.gelu(x)`.

    In its tanh form, or with `approximate=False` as x times the normal distribution function.
    """
    if not approximate:
        return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + tanh(inner))


@operation
def silu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(x). `md.silu(x)`."""
    return x * sigmoid(x)


@operation
def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)) without overflow. `md.softplus(x)`."""
    return logaddexp(x, 0)


@operation
def log_sigmoid(x: Tensor) -> Tensor:
    """Returns log(sigmoid(x)) without overflow. `md.log_sigmoid(x)`."""
    return -softplus(-x)


@operation
def mish(x: Tensor) -> Tensor:
    """Returns x * tanh(softplus(x)) (Misra 2019). `md.mish(x)`."""
    return x * tanh(softplus(x))


@operation
def softsign(x: Tensor) -> Tensor:
    """Returns x / (1 + abs(x)). `md.softsign(x)`."""
    return x / (1 + abs(x))


@operation
def hard_tanh(x: Tensor) -> Tensor:
    """Returns x limited to [-1, 1]. `md.hard_tanh(x)`."""
    return clip(x, -1, 1)


@operation
def hard_sigmoid(x: Tensor) -> Tensor:
    """Returns x / 6 + 1/2 limited to [0, 1]. `md.hard_sigmoid(x)`."""
    return relu6(x + 3) / 6


@operation
def hard_silu(x: Tensor) -> Tensor:
    """Returns x * hard_sigmoid(x). `md.hard_silu(x)`."""
    return x * hard_sigmoid(x)
