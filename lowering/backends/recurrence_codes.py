"""The transfer of a shard of a linear recurrence: its last state as a function of the one before.

Over a shard, h[i] = decay[i] * h[i-1] + x[i] maps the state h before it to `factor * h + offset`.
That formula is not enough: on the way h may leave the range, and from there on it is infinite or
NaN. So a transfer is three numbers: the offset, the mantissa of the factor, and an s32 code with
these fields:

- the exponent of the factor, from -4095 to 4095, which exceeds the range of every dtype;
- the largest exponent of the products of the first decays, at least 1;
- the last state if the state before is inf, and if it is -inf: `NAN`, `UP` (inf) or `DOWN` (-inf);
- whether the shard `stops`: its first infinity comes from an infinite decay or from an overflow, so
  that its sign depends on the state before. Factor and offset then stand for the steps up to there.

If the first value that is not finite is in x, the factor is 0, and the offset is the last state.
"""

from __future__ import annotations

from typing import Any

NAN, UP, DOWN = 0, 1, 2
LIMIT = 4095  # of exponents


def pack(exponent: Any, largest: Any, up: Any, down: Any, stops: Any) -> Any:
    """Returns the code of s32 fields; the magnitudes of the first two are at most `LIMIT`."""
    return (exponent + (LIMIT + 1)) + 2**13 * largest + 2**25 * up + 2**27 * down + 2**29 * stops


def unpack(code: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Returns the fields of a code."""
    exponent, largest = code % 2**13 - (LIMIT + 1), code // 2**13 % 2**12
    return exponent, largest, code // 2**25 % 4, code // 2**27 % 4, code // 2**29
