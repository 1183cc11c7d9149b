"""Complex numbers and their parts.

A cotangent of z is dL/d(real z) - i dL/d(imag z); see `elementwise`.
"""

from __future__ import annotations

from meshdsl.ops.creation import zeros
from meshdsl.ops.elementwise.arithmetic import atan2, cast, conjugate
from meshdsl.ops.elementwise.broadcasting import binary, unary
from meshdsl.ops.operation import operation
from meshdsl.tensors.dtypes import complex_dtype, is_complex, need_kind, real_dtype
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Work

__all__ = ["angle", "complex", "conj", "imag", "real"]

_real = unary(
    "real",
    lambda g, y, x: cast(g, x.dtype),
    "c",
    "The real part.",
    work=Work.NONE,
    result=real_dtype,
    linear=(0,),
)
_imag = unary(
    "imag",
    lambda g, y, x: -cast(g, x.dtype) * 1j,
    "c",
    "The imaginary part.",
    work=Work.NONE,
    result=real_dtype,
    linear=(0,),
)
complex = binary(
    "complex",
    [lambda g, z, x, y: _real(g), lambda g, z, x, y: -_imag(g)],
    "f",
    "Returns x + iy: complex64 of float32 parts, complex128 of float64 ones.",
    work=Work.NONE,
    result=complex_dtype,
    linear=(0, 1),
    additive=True,
)


@operation
def real(x: Tensor) -> Tensor:
    """Returns the real part: float32 for complex64; of a real number, itself.

    Raises:
        ValueError: x is neither complex nor floating-point.

    Examples:
        >>> z = md.named(np.complex64([1 + 2j, 3 - 4j]), ["frequency"])
        >>> print(md.real(z))
        f32[frequency=2] [1. 3.]
    """
    need_kind(x.dtype, "cf")
    return _real(x) if is_complex(x.dtype) else x


@operation
def imag(x: Tensor) -> Tensor:
    """Returns the imaginary part: float32 for complex64; of a real number, 0.

    Raises:
        ValueError: x is neither complex nor floating-point.

    Examples:
        >>> z = md.named(np.complex64([1 + 2j, 3 - 4j]), ["frequency"])
        >>> print(md.imag(z))
        f32[frequency=2] [ 2. -4.]
    """
    need_kind(x.dtype, "cf")
    return _imag(x) if is_complex(x.dtype) else zeros(x.shape, x.dtype)


@operation
def conj(x: Tensor) -> Tensor:
    """Returns the complex conjugate; of a real number, itself.

    Raises:
        ValueError: x is neither complex nor floating-point.

    Examples:
        >>> z = md.named(np.complex64([1 + 2j, 3 - 4j]), ["frequency"])
        >>> print(md.conj(z))
        c64[frequency=2] [1.-2.j 3.+4.j]
    """
    need_kind(x.dtype, "cf")
    return conjugate(x) if is_complex(x.dtype) else x


@operation
def angle(x: Tensor) -> Tensor:
    """Returns the angle of complex numbers, from -pi to pi.

    Raises:
        ValueError: x is neither complex nor floating-point.

    Examples:
        >>> z = md.named(np.complex64([1, 1 + 1j, -2]), ["frequency"])
        >>> print(md.angle(z))
        f32[frequency=3] [0.     0.7854 3.1416]
    """
    return atan2(imag(x), real(x))
