"""Costs: the times of the actions of a schedule, in any unit, and the memory that they keep."""

from __future__ import annotations

from dataclasses import dataclass, fields

from meshdsl.lowering.pipelines.actions import Action, Kind

PerChunk = float | tuple[float, ...]
_SHARES = ("overlap", "kept")


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch. A number is for all chunks; a tuple has one number per chunk.

    Attributes:
        forward: the time of `F`.
        inputs: the time of `I`.
        weights: the time of `W`.
        backward: the time of `B`; None is the sum of the times of `I` and `W`.
        send: the time of a message from a chunk to the next chunk. The gradient in the other
            direction takes the same time. A tuple has the time of the first of the two chunks.
        overlap: the time of `OVERLAP_F_B`, as a share of the sum of the times of its parts.
        activations: the bytes that a forward pass keeps for the backward pass; 1 counts chunks.
        kept: the share of `activations` that a stage keeps between `I` and `W`.
    """

    forward: PerChunk = 1.0
    inputs: PerChunk = 1.0
    weights: PerChunk = 1.0
    backward: PerChunk | None = None
    send: PerChunk = 0.0
    overlap: float = 1.0
    activations: PerChunk = 1.0
    kept: float = 1.0

    def __post_init__(self) -> None:
        for name, value in self._given():
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(number >= 0 for number in numbers):
                raise ValueError(f"`{name}={value}` of a pipeline must not be less than 0")
            if name in _SHARES and not all(number <= 1 for number in numbers):
                raise ValueError(f"`{name}={value}` of a pipeline is a share: give 0 to 1")

    def fit(self, chunks: int) -> None:
        """Checks that each tuple has one number per chunk.

        Raises:
            ValueError: A tuple has another length.
        """
        for name, value in self._given():
            if isinstance(value, tuple) and len(value) != chunks:
                raise ValueError(
                    f"`{name}` has {len(value)} numbers, and the schedule has {chunks} chunks: "
                    "give one number per chunk, or one for all"
                )

    def _given(self) -> list[tuple[str, PerChunk]]:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, value) for name, value in values if value is not None]

    def seconds(self, action: Action) -> float:
        """Returns the time of an action on its stage; 0 if it is not a computation."""
        if action.kind == Kind.OVERLAP:
            return self.overlap * sum(self.seconds(part) for part in action.parts)
        if action.kind == Kind.BACKWARD and self.backward is not None:
            return _of(self.backward, action.chunk)
        times = {Kind.FORWARD: self.forward, Kind.INPUTS: self.inputs, Kind.WEIGHTS: self.weights}
        return sum(_of(times[result.kind], result.chunk) for result in action.results)

    def message_seconds(self, result: Action) -> float:
        """Returns the time of the message that carries a result, `F` or `I`."""
        return _of(self.send, result.chunk - (result.kind == Kind.INPUTS))

    def kept_by(self, result: Action) -> float:
        """Returns the change of the kept activations of a stage by a result `F`, `I` or `W`."""
        size = _of(self.activations, result.chunk)
        if result.kind == Kind.FORWARD:
            return size
        return -size * (self.kept if result.kind == Kind.WEIGHTS else 1 - self.kept)


def _of(value: PerChunk, chunk: int) -> float:
    return value[chunk] if isinstance(value, tuple) else value
