"""Splits of documents into those to train on, to validate with and to test with: `949,50,1`.

Guarantees:
    Every document is in one split, which is a function of its number and the ratios alone.
    Of any run of documents, each split gets its share to within a few of them, so no folder or
    source is all in one; documents added at the end move no other.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Ratios = tuple[Fraction, Fraction, Fraction]
SPLITS = ("train", "valid", "test")
# Multiples of the golden ratio, modulo 1, fall evenly wherever they start (Knuth, "The art of
# computer programming", volume 3, section 6.4). This is its fractional part, times 2**64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def parse_ratios(text: str) -> Ratios:
    """Reads two or three numbers, relative to each other: `949,50,1`; the third is 0 by default.

    Raises:
        ValueError: they are not such numbers, or nothing is left to train on.
    """
    try:
        ratios = [Fraction(part.strip()) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        ratios = []
    if len(ratios) not in (2, 3) or min(ratios) < 0 or ratios[0] == 0:
        raise ValueError(
            "needs the parts for training, validation and test, as 949,50,1, the first of them "
            f"above 0; got {text!r}"
        )
    train, valid, test = [*ratios, Fraction(0)][:3]
    return train, valid, test


def splits_of(count: int, ratios: Ratios) -> NDArray[np.int64]:
    """Returns the number in `SPLITS` of each of `count` documents."""
    there = [number for number, ratio in enumerate(ratios) if ratio]
    parts = list(accumulate(ratios[number] for number in there))
    limits = [int(part * 2**64 / parts[-1]) for part in parts[:-1]]
    places = np.arange(count, dtype=np.uint64) * _GOLDEN
    chosen = np.searchsorted(np.asarray(limits, np.uint64), places, side="right")
    return np.asarray(there)[chosen]
