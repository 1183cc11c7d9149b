"""How tokens are chosen: the settings of `nn.sample`."""

from __future__ import annotations

from dataclasses import dataclass

FILTERS = frozenset(["noise", "top_k", "top_p", "min_p", "repetition_penalty"])


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: `Sampling(temperature=0.8, top_p=0.95)`.

    Attributes:
        temperature: what scores are divided by; 0 takes the most likely token.
        top_k: draw from this many of the most likely tokens; 0: all.
        top_p: draw from the fewest that together have this probability; 1: all.
        min_p: draw from those with at least this share of the largest probability; 0: all.
        repetition_penalty: lowers the scores of tokens that the text has already; 1: does not.
        seed: of the draws. The same seed gives the same text on every layout, up to ties.

    Raises:
        ValueError: numbers are out of range; all of them are listed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = {
            "temperature": ("at least 0", self.temperature >= 0),
            "top_k": ("at least 0", self.top_k >= 0),
            "top_p": ("above 0 and at most 1", 0 < self.top_p <= 1),
            "min_p": ("from 0 to 1", 0 <= self.min_p <= 1),
            "repetition_penalty": ("above 0", self.repetition_penalty > 0),
            "seed": ("from 0 to 2**64 - 1", 0 <= self.seed < 2**64),
        }
        problems = [
            f"{name}={getattr(self, name)}: needs to be {range_}"
            for name, (range_, fits) in wanted.items()
            if not fits
        ]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def filters(self) -> frozenset[str]:
        """What a step computes to choose tokens, beside their scores: compiled into it."""
        if not self.temperature:
            used = {"repetition_penalty": self.repetition_penalty != 1}
        else:
            used = {
                "noise": True,
                "top_k": self.top_k > 0,
                "top_p": self.top_p < 1,
                "min_p": self.min_p > 0,
                "repetition_penalty": self.repetition_penalty != 1,
            }
        return frozenset(name for name, on in used.items() if on)
