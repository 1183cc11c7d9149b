"""Where half precision is not enough: sums of many terms, exponentials, logarithms."""

from __future__ import annotations

import meshdsl as md
from meshdsl.tensors.dtypes import accumulator


def at_least_float32(x: md.Tensor) -> md.Tensor:
    """Returns x in float32 if its dtype has fewer bits, else x itself."""
    return md.cast(x, accumulator(x.dtype))
