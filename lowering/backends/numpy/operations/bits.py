"""Bit operations on aligned dims."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Emitter
from meshdsl.lowering.backends.numpy.operations.elementwise import elementwise

EMITTERS: Mapping[str, Emitter] = {
    "bit_and": elementwise(np.bitwise_and),
    "bit_not": elementwise(np.bitwise_not),
    "bit_or": elementwise(np.bitwise_or),
    "bit_xor": elementwise(np.bitwise_xor),
    "population_count": elementwise(lambda x: np.bitwise_count(x.view(f"u{x.itemsize}"))),
    "shift_left": elementwise(np.left_shift),
    "shift_right": elementwise(np.right_shift),
}
