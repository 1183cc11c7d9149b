"""Options: the choices that lowering has between programs with the same results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from meshdsl.layouts.calibration import find_hardware
from meshdsl.lowering.pipelines.named import NAMES
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import BFLOAT16, accumulator

Context: TypeAlias = Literal["auto", "ring", "gather", "sums"]
Weights: TypeAlias = Literal["auto", "again", "keep"]
ReduceDtype: TypeAlias = Literal["auto", "float32", "same"]

# The dtypes whose partial sums are added up in a wider one.
_NARROW: dict[ReduceDtype, frozenset[np.dtype]] = {
    "auto": frozenset([np.dtype("float16")]),
    "float32": frozenset([np.dtype("float16"), BFLOAT16]),
    "same": frozenset(),
}
PIPELINES = ("auto", "none", *NAMES)


@dataclass(frozen=True)
class Options:
    """Options of lowering.

    By default, tensors that are stored split are gathered where they are used.

    Attributes:
        memory: the bytes that one device may use (`program.peak_bytes`); None: there is no limit.
            Of the programs that fit, lowering chooses the one that sends the fewest bytes. It warns
            if none fits.
        weights: whether weights that are gathered for the forward pass are kept for the backward
            pass. `again` frees them and gathers them again; `keep` keeps them; `auto` keeps weights
            outside of loops that hardly raise the peak (see `placement.keeping`), and gathers the
            others again.
        bucket_bytes: the most bytes of a collective that several small ones are joined into; 0: no
            collectives are joined. None: there is no limit; if the hardware is known, and the step
            is faster by simulation, only collectives that are mostly latency are joined.
        overlap: whether gathers before products, and reductions after products, become rings of
            permutes that run beside the product.
        prefetch: whether loops gather the weights of the next iteration during the present one.
            That needs memory for one more layer of gathered weights, and one more gather than there
            are iterations. With a limit on memory, it is done only if the program then fits.
        context: how attention reads a split memory. `ring` sends keys and values around; `gather`
            gathers them on all devices; `sums` reduces the results; `auto` chooses the way that
            sends the fewest bytes and fits, also among all_to_alls that gather the memory for each
            device's share of the heads. If the hardware is known, `auto` is the way that is fastest
            by simulation.
        zigzag: whether a causal ring distributes its queries so that all devices have equal work in
            every step. The busiest device then has half the work; queries, keys, values and results
            are sent to their devices and back once more.
        reduce_dtype: the dtype in which partial sums are added up. `float32`: float32 for all half
            precision, at twice the bytes; `same`: the dtype of the tensor; `auto`: `float32` for
            float16, since partial sums may exceed its range where their sum does not, and `same`
            for bfloat16, which only loses digits.
        halves: the dim of which a program computes two halves side by side, so that the collectives
            of one travel beside the work of the other (see `passes.halves`). `none`: no dim;
            `auto`: the dim, if any, with which the step is faster by simulation, if the hardware is
            known.
        hardware: the name of the hardware that the program is for, as `v5p`, or the file of a
            calibration; None: that of the TPUs of the mesh, if they are at hand. Where it is known,
            lowering chooses the fastest program by simulation (see `choices`).
        pipeline: the schedule of the pipeline that a rule such as `layers:pipe` makes of a training
            step: `circular`, `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zbv`, or a CSV file in
            PyTorch's notation (see `pipelines`). `auto` is `circular`: 1F1B on a clock, which needs
            the fewest ticks of all that run on one; or `zbv` or `1f1b`, which keep fewer
            activations, if only these fit into memory. `none`: there is no pipeline, and each
            device gathers the layers one by one.
        pipeline_rounds: how many chunks of layers each stage of a pipeline has. With more rounds
            the bubble is smaller, and more is sent. None: one; if the hardware is known, and
            `pipeline` is `auto`, as many as make the fastest step by simulation.
        compiler_flags: (name, value) of flags for the compiler behind the JAX backend, in addition
            to those recommended for its devices; after `("none", True)`, instead of these.

    Raises:
        ValueError: a number of bytes is negative or no integer; rounds are below 1; a word, a
            schedule or the hardware is unknown.

    Examples:
        >>> x = md.spec(md.dims(batch=8, embed=4), "bfloat16")
        >>> for dtype in ("same", "float32"):
        ...     options = md.Options(reduce_dtype=dtype)
        ...     step = md.jit(lambda x: md.sum(x, "embed"), "data:2", "embed:data", options=options)
        ...     print(dtype, step.lower(x).collectives[0].wire_bytes)
        same 16.0
        float32 32.0
    """

    memory: int | None = None
    weights: Weights = "auto"
    bucket_bytes: int | None = None
    overlap: bool = False
    prefetch: bool = False
    context: Context = "auto"
    zigzag: bool = False
    reduce_dtype: ReduceDtype = "auto"
    compiler_flags: tuple[tuple[str, bool | int | float | str], ...] = ()
    halves: str = "auto"
    hardware: str | None = None
    pipeline: str = "auto"
    pipeline_rounds: int | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "bucket_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise ValueError(
                    f"{name} is a number of bytes from 0, as in {name}=2**30, not {value!r}"
                )
        rounds = self.pipeline_rounds
        if not (rounds is None or (isinstance(rounds, int) and rounds >= 1)):
            raise ValueError(f"pipeline_rounds is a number from 1, not {rounds!r}")
        if not (self.pipeline in PIPELINES or str(self.pipeline).endswith(".csv")):
            raise ValueError(
                f"pipeline is one of {', '.join(PIPELINES)}, or a CSV file, not "
                f"{self.pipeline!r}{did_you_mean(str(self.pipeline), PIPELINES)}"
            )
        words = {"weights": Weights, "context": Context, "reduce_dtype": ReduceDtype}
        for name, known in ((name, get_args(kind)) for name, kind in words.items()):
            value = getattr(self, name)
            if value not in known:
                nearest = did_you_mean(str(value), known)
                raise ValueError(f"{name} is one of {', '.join(known)}, not `{value}`{nearest}")
        if not (isinstance(self.halves, str) and self.halves.isidentifier()):
            raise ValueError(f"halves is auto, none or the name of a dim, not {self.halves!r}")
        if self.hardware is not None:
            find_hardware(self.hardware)

    @staticmethod
    def of(options: Options | None) -> Options:
        """Returns options, the default ones for None.

        Raises:
            ValueError: they are of another type.
        """
        if options is None:
            return DEFAULT
        if not isinstance(options, Options):
            raise ValueError(
                f"options are given as md.Options(memory=16 * 2**30), not as {options!r}"
            )
        return options


DEFAULT = Options()


def dtype_of_sums(dtype: np.dtype, options: Options) -> np.dtype:
    """Returns the dtype in which partial sums of a dtype are added up; see `reduce_dtype`."""
    return accumulator(dtype) if dtype in _NARROW[options.reduce_dtype] else dtype
