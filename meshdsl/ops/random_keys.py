"""Keys, and the random bits that depend on a key and a position, and on nothing else.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
with the element's global index as the counter: the same values on every layout, mesh and backend.
A key is a uint32 tensor with the dim `random_key=2`. It is for one use: to draw once, or to make
further keys once by `split` or any number of times by `fold_in` with different numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.creation import as_tensor, full, sized
from meshdsl.ops.elementwise.arithmetic import cast
from meshdsl.ops.operation import operation, reported_as
from meshdsl.ops.shapes.joining import unstack
from meshdsl.tensors.dims import RANDOM_KEY, Dimension, DimsLike, Shape
from meshdsl.tensors.dtypes import is_integer
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Primitive
from meshdsl.tracing.trace import bind_one

KEY = RANDOM_KEY
"""The last dim of a random key.

`md.random.key(0)` is u32[random_key=2]; keys that are stacked along a dim `layers` are
u32[layers, random_key=2].
"""
_UINT32 = np.dtype("uint32")
# High counter words of keys made by `fold_in` and by name; elements have far smaller ones.
_FOLDED, _NAMED = 2**31, 2**31 + 2**30
_TOGETHER = 8  # more keys than these are drawn at once: each draw takes long to compile


def _check_key(source: Tensor) -> None:
    if source.dtype != _UINT32 or source.shape != Shape([KEY]):
        raise ValueError(f"a key is u32[{KEY}], as made by md.random.key; got {source}")


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    _check_key(inputs[0])
    return [(Shape([*params["shape"], KEY]) if params["pairs"] else params["shape"], _UINT32)]


def _fold_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    source, number = inputs
    own = source.shape.without([KEY.name])
    if source.dtype != _UINT32 or source.shape != Shape([*own, KEY]):
        _check_key(source)
    if missing := [str(dim) for dim in own if number.shape.find(dim.name) != dim]:
        raise ValueError(f"the numbers {number} need the dims of the keys: {', '.join(missing)}")
    return [(Shape([*number.shape, KEY]), _UINT32)]


def _drawn(shape: Shape, *, pairs: bool, start: int = 0) -> dict[str, Any]:
    """The parameters of a draw: counters count up from `start`; `pairs` keeps both output words."""
    return {"shape": shape, "pairs": pairs, "start": start}


RANDOM_BITS = Primitive("random_bits", _rule)
FOLD_IN = Primitive("fold_in", _fold_rule)


def key(seed: int) -> NamedArray:
    """Returns the key of a seed (0 to 2**64 - 1). `md.random.key(0)`.

    Raises:
        ValueError: the seed is not an integer from 0 to 2**64 - 1.

    Examples:
        >>> key, dims = md.random.key(0), md.dims(batch=4)
        >>> key.dims
        [random_key=2]
        >>> x, y = md.random.normal(key, dims), md.random.normal(key, dims)
        >>> np.array_equal(x, y)  # there is no hidden state
        True
    """
    with reported_as("key"):
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
            raise ValueError(f"a seed is a whole number from 0 to 2**64 - 1, got {seed!r}")
    seed = int(seed)
    return NamedArray(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), Shape([KEY]))


@operation
def split(source: Tensor, into: int | Dimension | str | Sequence[str] = 2) -> Any:
    """Makes independent keys from one.

    `first, second = md.random.split(key)`, or `keys = md.random.split(key, ["params", "dropout"])`.

    Args:
        into: a number of keys; a dim, to stack them along it in one tensor; or names. The key of a
            name depends on the name only, so that other names can be added and removed.

    Returns:
        A list of keys, one tensor, or a dict of keys by name.

    Raises:
        ValueError: a name occurs twice, or `source` is no key.

    Examples:
        >>> key = md.random.key(0)
        >>> keys = md.random.split(key, ["params", "dropout"])
        >>> more = md.random.split(key, ["augment", "params"])
        >>> np.array_equal(keys["params"], more["params"])
        True
        >>> md.random.split(key, md.Dimension("layers", 3)).dims
        [layers=3, random_key=2]
    """
    source = as_tensor(source)
    if isinstance(into, Dimension):
        return bind_one(RANDOM_BITS, (source,), _drawn(Shape([into]), pairs=True))
    if isinstance(into, int):
        if into > _TOGETHER:
            stacked = Dimension("split_keys", into)
            return unstack(
                bind_one(RANDOM_BITS, (source,), _drawn(Shape([stacked]), pairs=True)), stacked
            )
        each = Shape()
        return [
            bind_one(RANDOM_BITS, (source,), _drawn(each, pairs=True, start=i)) for i in range(into)
        ]
    names = [into] if isinstance(into, str) else list(into)
    if len(set(names)) < len(names):
        raise ValueError(f"a name occurs twice in {names}")
    return {name: _of_name(source, name) for name in names}


def _of_name(source: Tensor, name: str) -> Tensor:
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], ">u4")
    high, low = int(words[0]) % 2**30, int(words[1])
    return bind_one(FOLD_IN, (source, full([], low, _UINT32)), {"high": _NAMED + high})


@operation
def fold_in(source: Tensor, number: int | Tensor) -> Tensor:
    """Returns the key of a number: `md.random.fold_in(key, step)`; different for each number.

    Args:
        source: a key; or a tensor of keys, [..., random_key], with dims of `number`.
        number: one whole number, or a tensor of them for a key each. Of 64-bit numbers the lower 32
            bits count.

    Returns:
        [*number's dims, random_key].

    Raises:
        ValueError: the number is not a whole one, `source` is no key, or keys have a dim that the
            numbers lack.

    Examples:
        >>> key = md.random.key(0)
        >>> keys = md.random.fold_in(key, md.arange(md.Dimension("layers", 3)))
        >>> keys.dims, np.array_equal(keys.data[2], md.random.fold_in(key, 2))
        ([layers=3, random_key=2], True)
    """
    if isinstance(number, int) and not isinstance(number, bool):
        number = full([], number % 2**32, _UINT32)
    if not (isinstance(number, Tensor) and is_integer(number.dtype)):
        raise ValueError(f"folds in whole numbers, got {number}")
    return bind_one(FOLD_IN, (as_tensor(source), cast(number, _UINT32)), {"high": _FOLDED})


@operation
def bits(source: Tensor, dims: DimsLike) -> Tensor:
    """Returns 32 uniform random bits per element, as uint32.

    `md.random.bits(key, [batch, length])`.

    Examples:
        >>> x = md.random.bits(md.random.key(0), md.dims(batch=2, length=3))
        >>> print(x.dtype, x.dims)
        uint32 [batch=2, length=3]
    """
    return bind_one(RANDOM_BITS, (as_tensor(source),), _drawn(sized(dims), pairs=False))


def words(source: Tensor, dims: DimsLike) -> Tensor:
    """Returns 64 random bits per element, as two uint32 along the dim `random_key`."""
    return bind_one(RANDOM_BITS, (as_tensor(source),), _drawn(sized(dims), pairs=True))
