"""Threefry-2x32, 20 rounds (Salmon et al. 2011), for any type with uint32 `+ ^ << >>`."""

from __future__ import annotations

from typing import Any

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key0: Any, key1: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Returns the two output words of each counter (high, low) under a key."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x, y = high + keys[0], low + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
