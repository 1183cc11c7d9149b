"""What a shard of a linear recurrence makes of the state before it, in three numbers.

h[i] = decay[i] * h[i-1] + x[i] makes of a state h, over a shard, `factor * h + offset`. That is
not all: on the way h may leave the range, and a state that has is infinite or NaN from there on.
So beside the offset and the mantissa of the factor goes a code, an s32 number of these fields:

- the exponent of the factor, from -4095 to 4095, which is out of the range of every dtype;
- the exponent of the largest product of decays from the first one on, 1 at least;
- what the shard makes of an infinite state, and of a negative infinite one: `NAN`, `UP`, `DOWN`;
- whether what is not finite first in the shard has a sign that depends on the state before it: it
  comes of an infinite decay, or has left the range. Then factor and offset lead only up to there.

If what is not finite first is in x, the factor is 0, and the offset what comes of it.
"""

from __future__ import annotations

from typing import Any

NAN, UP, DOWN = 0, 1, 2
LIMIT = 4095  # of exponents


def pack(exponent: Any, largest: Any, up: Any, down: Any, stops: Any) -> Any:
    """Returns the code of s32 fields of which the first two are at most `LIMIT`."""
    return (exponent + (LIMIT + 1)) + 2**13 * largest + 2**25 * up + 2**27 * down + 2**29 * stops


def unpack(code: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Returns the fields of a code."""
    exponent, largest = code % 2**13 - (LIMIT + 1), code // 2**13 % 2**12
    return exponent, largest, code // 2**25 % 4, code // 2**27 % 4, code // 2**29
