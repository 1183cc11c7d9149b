"""Batch-size ramp-up: from a small batch to the full one, by samples seen.

See Brown et al. 2020, appendix B. The rule is that of Megatron-LM's `--rampup-batch-size`. The size
is a function of the number of samples seen, so a resumed run goes on with the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchRamp:
    """Grows the batch from `start` by `increment`, in equal parts of the first `samples`.

    Raises:
        ValueError: a number is below 1.

    Examples:
        >>> from meshdsl.training import BatchRamp
        >>> ramp = BatchRamp(2, 2, samples=12)
        >>> ramp.sizes(8)
        [2, 4, 6, 8]
    """

    start: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, got {value}"
            for name, value in vars(self).items()
            if value < 1
        ]
        if problems:
            raise ValueError(f"batch ramp: {'; '.join(problems)}")

    @staticmethod
    def parse(text: str) -> BatchRamp:
        """Reads `start,increment,samples`: "16,8,300_000".

        Raises:
            ValueError: the text is not of this form, or a number is below 1.
        """
        try:
            start, increment, samples = (int(part.replace("_", "")) for part in text.split(","))
        except ValueError:
            raise ValueError(
                f"needs start,increment,samples, as in 16,8,300_000; got {text!r}"
            ) from None
        return BatchRamp(start, increment, samples)

    def sizes(self, full: int) -> list[int]:
        """Returns the batch sizes in order, the full one last.

        Raises:
            ValueError: the increments do not lead from `start` to `full`.
        """
        if full < self.start or (full - self.start) % self.increment:
            near = full - (full - self.start) % self.increment if full > self.start else self.start
            raise ValueError(
                f"batch ramp: steps of {self.increment} do not lead from {self.start} to a batch "
                f"of {full}; take a batch of {near} or {near + self.increment}, or another start"
            )
        return list(range(self.start, full + 1, self.increment))

    def size_at(self, seen: int, full: int) -> int:
        """Returns the size of the next batch after `seen` samples; errors as in `sizes`."""
        sizes = self.sizes(full)
        increments = len(sizes) - 1
        return sizes[min(seen * increments // self.samples, increments)]
