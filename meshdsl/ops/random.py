"""Random numbers that depend on a key and a position, and on nothing else.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
with the element's global index as the counter: the same values on every layout, mesh and backend.
A key is a uint32 tensor with the dim `random_key=2`; keys of a stacked dim come from `split(key,
layers)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.array import NamedArray
from meshdsl.dims import Dimension, DimsLike, Shape
from meshdsl.dtypes import as_dtype, is_float, short
from meshdsl.graph import Aval, Primitive, Tensor
from meshdsl.ops.creation import as_tensor, sized
from meshdsl.ops.elementwise import cast, cos, log, sqrt
from meshdsl.ops.operation import operation
from meshdsl.trace import bind_one

KEY = Dimension("random_key", 2)
_UINT32 = np.dtype("uint32")
# Bits that a float's mantissa holds exactly; float64 numbers are multiples of 2**-32.
_EXACT_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 32}


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (source,) = inputs
    if source.dtype != _UINT32 or source.shape != Shape([KEY]):
        raise ValueError(f"a key is u32[{KEY}], as made by md.random.key; got {source}")
    return [(Shape([*params["shape"], KEY]) if params["pairs"] else params["shape"], _UINT32)]


def _drawn(shape: Shape, *, pairs: bool, start: int = 0) -> dict[str, Any]:
    """The parameters of a draw: counters count up from `start`; `pairs` keeps both output words."""
    return {"shape": shape, "pairs": pairs, "start": start}


RANDOM_BITS = Primitive("random_bits", _rule)
SHIFT_RIGHT = Primitive("shift_right", lambda inputs, params: [(inputs[0].shape, inputs[0].dtype)])


def key(seed: int) -> NamedArray:
    """Returns the key of a seed (0 to 2**64 - 1)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"a seed is a number from 0 to 2**64 - 1, got {seed}")
    return NamedArray(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), Shape([KEY]))


@operation
def split(source: Tensor, into: int | Dimension = 2) -> Any:
    """Makes independent keys from one: a list of `into` keys, or one tensor with a stacked dim."""
    source = as_tensor(source)
    if isinstance(into, Dimension):
        return bind_one(RANDOM_BITS, (source,), _drawn(Shape([into]), pairs=True))
    each = Shape()
    return [
        bind_one(RANDOM_BITS, (source,), _drawn(each, pairs=True, start=i)) for i in range(into)
    ]


@operation
def bits(source: Tensor, dims: DimsLike) -> Tensor:
    """Returns 32 uniform random bits per element, as uint32."""
    return bind_one(RANDOM_BITS, (as_tensor(source),), _drawn(sized(dims), pairs=False))


@operation
def uniform(source: Tensor, dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns numbers uniform on [0, 1), all multiples of one power of two."""
    dtype = as_dtype(dtype)
    if not is_float(dtype):
        raise ValueError(f"needs a floating-point dtype, got {short(dtype)}")
    exact = _EXACT_BITS[dtype.name]
    drawn = bits(source, dims)
    if exact < 32:
        drawn = cast(_shift_right(drawn, 32 - exact), "float32")
        return cast(drawn * 2.0**-exact, dtype)
    return cast(drawn, dtype) * 2.0**-32


@operation
def normal(source: Tensor, dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns standard normal numbers, by the transform of Box and Muller (1958)."""
    dtype = as_dtype(dtype)
    work = dtype if dtype.name == "float64" else np.dtype("float32")
    radius_key, angle_key = split(source, 2)
    radius = sqrt(-2.0 * log(1.0 - uniform(radius_key, dims, work)))
    return cast(radius * cos(2 * math.pi * uniform(angle_key, dims, work)), dtype)


@operation
def bernoulli(source: Tensor, probability: float, dims: DimsLike) -> Tensor:
    """Returns a bool tensor, true with the given probability."""
    return uniform(source, dims) < probability


def _shift_right(x: Tensor, places: int) -> Tensor:
    return bind_one(SHIFT_RIGHT, (x,), {"places": places})
