"""`meshdsl explain --decode`: what writing one more token of each text keeps, sends and takes.

It is the step that `meshdsl generate` runs for each token, lowered and not compiled: it takes the
likeliest tokens, and its caches are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from absl import flags

from meshdsl.cli.job import Job
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.generation.programs import Place, Programs
from meshdsl.generation.reading import sizes_of
from meshdsl.layouts.automatic import is_auto
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.lowering.program import Value

if TYPE_CHECKING:
    from meshdsl.lowering.program import SpmdProgram
    from meshdsl.reports.explain import Explanation

_CACHE = "state/cache/"
_OTHER_REPORTS = ("compare_layout", "stage", "failures", "mtbf", "job_mtbf")
_OF_TRAINING = ("microbatches", "remat", "batch_ramp", "pipeline", "pipeline_rounds")


@dataclass(frozen=True)
class Decoded:
    """Figures of a step of decoding.

    Attributes:
        texts: how many are written at once, over the whole mesh.
        length: the tokens of a text, its prompt included, that the caches have room for.
        cache_bytes: of all caches of one device.
        text_bytes: of the caches of one text, over the whole mesh.
        seconds: the simulated time of a step.
    """

    texts: int
    length: int
    cache_bytes: int
    text_bytes: float
    seconds: float
    collectives: int
    wire_bytes: float

    def as_values(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        return {
            "texts": self.texts,
            "length": self.length,
            "cache_bytes": self.cache_bytes,
            "cache_bytes_of_a_text": self.text_bytes,
            "tokens_per_second": self.tokens_per_second,
        }

    @property
    def tokens_per_second(self) -> float:
        """Of all texts together."""
        return self.texts / self.seconds if self.seconds else 0.0

    @property
    def notes(self) -> tuple[str, str]:
        """What a report says of them."""
        texts = f"each of {self.texts:,} texts" if self.texts > 1 else "one text"
        sent = "nothing is sent"
        if self.collectives:
            many = "collectives" if self.collectives > 1 else "collective"
            sent = (
                f"{self.collectives:,} {many} for each token, in which a device sends "
                f"{show_bytes(self.wire_bytes)}"
            )
        return (
            f"a step writes one token of {texts}. Caches for {self.length:,} tokens take "
            f"{show_bytes(self.cache_bytes)} per device, and {show_bytes(self.text_bytes)} for "
            "each text over the mesh; they count to other inputs",
            f"{sent}; {show_seconds(self.seconds)} simulated, {self.tokens_per_second:,.0f} "
            "tokens/s",
        )


def asks_for_decoding(values: flags.FlagValues, problems: Problems) -> bool:
    """Whether the flags ask for a step of decoding; adds to the problems."""
    if values.decode is not True:
        return False
    others = [name for name in _OTHER_REPORTS if values[name].present]
    if others:
        listed = " and ".join(f"--{name}" for name in others)
        problems.add(f"--decode prints a report of its own: leave out {listed}")
    training = [name for name in _OF_TRAINING if values[name].present]
    if training:
        listed = " and ".join(f"--{name}" for name in training)
        problems.add(f"--decode trains nothing: leave out {listed}")
    if is_auto(values.mesh_shape) or is_auto(values.layout):
        problems.add("--decode: auto finds the best layout for training; name the mesh and layout")
    return True


def decoding_step(job: Job, problems: Problems) -> SpmdProgram:
    """Returns the step that writes a token of each of `--batch_size` texts of `--length` tokens.

    Half of these are the prompt, which is what an encoder reads if there is one.

    Raises:
        UsageError: the model writes no text, or has too few positions.
        ValueError: the layout does not fit.
    """
    prompt = max(1, job.length // 2)
    with problems.caught("--decode"):
        sizes = sizes_of(job.model, prompt, max(1, job.length - prompt), job.batch_size, None)
    problems.check()
    place = _Uncompiled(job.mesh, job.layout, job.backend, job.options)
    step: Any = Programs(job.model, frozenset(), sizes, place, lengths=[1]).steps[1]
    return replace(step, name="decode_step")


class _Uncompiled(Place):
    """A place whose steps are lowered only, and whose other programs are not there."""

    def program(
        self,
        function: Any,
        arguments: Sequence[Any],
        donate: str | Sequence[str] = (),
        main: bool = False,
    ) -> Any:
        """Returns the program of a step, or else None; arguments and errors as of `lowered`."""
        return self.lowered(function, arguments, donate, main) if main else None


def decoded(report: Explanation, job: Job) -> Decoded:
    """Returns the figures of the report of a step of decoding."""
    caches = [
        value for path, value in report.inputs if path.startswith(_CACHE) and _has_text(value)
    ]
    return Decoded(
        texts=job.batch_size,
        length=job.length,
        cache_bytes=sum(value.bytes for value in caches),
        text_bytes=sum(map(_whole_bytes, caches)) / job.batch_size,
        seconds=report.simulated.seconds,
        collectives=report.collectives,
        wire_bytes=report.wire_bytes,
    )


def _has_text(value: Value) -> bool:
    """Whether an input is a cache, rather than what counts its positions."""
    return len(value.shape) > 1


def _whole_bytes(value: Value) -> int:
    return prod(value.shape.sizes) * value.dtype.itemsize
