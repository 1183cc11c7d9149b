"""Options: what lowering may trade, where more than one way leads to the same values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from meshdsl.tensors.dims import did_you_mean

Context: TypeAlias = Literal["auto", "ring", "gather", "sums"]
Weights: TypeAlias = Literal["auto", "again", "keep"]
ReduceDtype: TypeAlias = Literal["auto", "float32", "same"]


@dataclass(frozen=True)
class Options:
    """What lowering may trade; by default what is stored split is gathered where it is used.

    Attributes:
        memory: bytes that one device may hold (`program.peak_bytes`). What fits and sends the
            fewest bytes is taken, and it is told if nothing fits; None: there is no limit.
        weights: what becomes of weights that are gathered for the forward pass: `again` frees them
            and gathers them again for the backward pass, `keep` keeps them; `auto` keeps those
            outside of loops that leave the peak as it is (see `placement.keeping`), and gathers the
            others again.
        bucket_bytes: the most bytes that one collective joins of several small ones; None: there
            is no limit, 0: none are joined.
        overlap: whether gathers before products, and reductions after them, become rings of
            permutes that run beside the product.
        prefetch: whether loops gather what an iteration needs while the one before is computed.
            That holds one more layer of gathered weights, and sends one gather more than there are
            iterations. With a limit on memory, only if that is kept.
        context: how attention reaches a split memory: `ring` sends keys and values around,
            `gather` has all of them everywhere, `sums` reduces the results; `auto`: what sends the
            fewest bytes and fits, of these and of an all_to_all that makes the memory whole for
            each device's share of the heads.
        zigzag: whether a causal ring deals its queries out so that every device has as much to do
            in every step: half the work of the busiest device, for sending queries, keys, values
            and results to their devices and back once more.
        reduce_dtype: in which dtype devices add up what they hold partial sums of: `float32` for
            all half precision, twice the bytes; `same`, that of the tensor; `auto`: `float32` for
            float16, whose range partial sums may leave where the sum does not, and `same` for
            bfloat16, which loses digits only.
        compiler_flags: of the compiler behind the JAX backend, (name, value) each, beside those
            recommended for its devices; after `("none", True)`, instead of them.

    Raises:
        ValueError: a number is negative or no number, or a word is none of those there are.
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

    def __post_init__(self) -> None:
        for name in ("memory", "bucket_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise ValueError(
                    f"{name} is a number of bytes from 0, as in {name}=2**30, not {value!r}"
                )
        words = {"weights": Weights, "context": Context, "reduce_dtype": ReduceDtype}
        for name, known in ((name, get_args(kind)) for name, kind in words.items()):
            value = getattr(self, name)
            if value not in known:
                nearest = did_you_mean(str(value), known)
                raise ValueError(f"{name} is one of {', '.join(known)}, not `{value}`{nearest}")


DEFAULT = Options()
