"""Probabilities of tokens beside those that are written: what a reader may ask of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenProbability:
    """How likely a token is after those before it, and which ones are the likeliest there.

    Attributes:
        token: its number.
        log_probability: the logarithm of its probability, by the model's scores alone; None: it is
            the first of a text.
        likeliest: the likeliest tokens with theirs, the likeliest first.
    """

    token: int
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepProbabilities:
    """What a step has of every position that it scores.

    Attributes:
        tokens: s32[positions].
        log_probabilities: of these: [positions].
        values, numbers: of the likeliest there: [positions, ranked].
    """

    tokens: NDArray[np.integer]
    log_probabilities: NDArray[np.floating]
    values: NDArray[np.floating]
    numbers: NDArray[np.integer]

    @staticmethod
    def of(tokens: Any, stepped: Mapping[str, Any]) -> StepProbabilities:
        """Returns those of a step's results, once the device has them."""
        flat = np.asarray(tokens).reshape(-1)
        chosen, values, numbers = (np.asarray(stepped[n]) for n in ("chosen", "values", "numbers"))
        ranked = values.shape[-1]
        return StepProbabilities(
            flat, chosen.reshape(-1), values.reshape(-1, ranked), numbers.reshape(-1, ranked)
        )

    def at(self, position: int) -> TokenProbability:
        """Returns the probability of the token at a position."""
        likeliest = zip(self.numbers[position], self.values[position], strict=True)
        return TokenProbability(
            int(self.tokens[position]),
            float(self.log_probabilities[position]),
            tuple((int(token), float(value)) for token, value in likeliest),
        )
