"""Instructions: everything that is known of each kind of instruction of an `SpmdProgram`.

One declaration per kind, in `KINDS`: what it computes, how compilers fuse it, and how passes may
move it. The costs, the passes, the checks and the printing read these facts. `kind_of` refuses a
name that is not declared, and a declaration without its arithmetic is refused when it is made.

Elementwise kinds come from the operations of the same name (`meshdsl.ops.elementwise`). There are
about 70 others. Many of them are steps of operations that are split over devices: `assemble`,
`local_slice` and `local_update` exchange windows, `recurrence_totals` and `states_before` carry a
linear recurrence from shard to shard, `scaled_prod` and `products_besides` an exact product.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshdsl.lowering.collectives import COLLECTIVES
from meshdsl.lowering.costs import arithmetic
from meshdsl.ops.elementwise.arithmetic import ELEMENTWISE
from meshdsl.tracing.graph import Primitive, Work

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction

Flops = Callable[["Instruction"], int]


class Fusion(enum.Enum):
    """How a compiler treats an instruction: what of it reaches memory."""

    VIEW = "its result is its operand, in the same buffer"
    PASSING = "its readers compute it as they read, where they can"
    REDUCTION = "it takes operands that are computed in passing"
    PRODUCT = "its result may be handed on to one elementwise reader"
    ALONE = "it reads and writes memory"


@dataclass(frozen=True)
class Kind:
    """What is known of a kind of instruction.

    Attributes:
        flops: the arithmetic of one device, of differentiable dtypes.
        fusion: what of it reaches memory.
        cheap: it only moves or converts data: passes may move it along with a collective.
        long: it runs long enough to hide a collective behind it.
        effect: it does something besides its results, as printing does.
        in_place: its result is its first operand, with a part of it written anew.
        elsewhere: what it reads lies at another place than its result, so it is not done in place.
        reads_part: it reads no more of its first operand than its result has.
        as_fast_as_memory: it has arithmetic, which takes no longer than reading its operands.
        along: the parameter that names its one dim, for printing.
        constant: it has no operands.
        own_line: it is not folded into a formula when a program is printed.
        costly: it is not computed again for every reader.
        symbol: how it is printed between its operands, or before its one operand.
    """

    name: str
    flops: Flops
    fusion: Fusion = Fusion.ALONE
    cheap: bool = False
    long: bool = False
    effect: bool = False
    in_place: bool = False
    elsewhere: bool = False
    reads_part: bool = False
    as_fast_as_memory: bool = False
    along: str = ""
    constant: bool = False
    own_line: bool = False
    costly: bool = False
    symbol: str = ""
    elementwise: bool = field(default=False, kw_only=True)

    @property
    def is_collective(self) -> bool:
        """Whether devices exchange data; see `lowering.collectives`."""
        return self.name in COLLECTIVES


KINDS: dict[str, Kind] = {}


def kind_of(name: str) -> Kind:
    """Returns what is known of a kind of instruction: `kind_of("einsum").long`.

    Raises:
        ValueError: it is not declared.
    """
    if name not in KINDS:
        raise ValueError(
            f"instruction `{name}` is not declared: say what it computes and how it is fused in "
            "lowering/instructions.py; or, of a collective, what it does to a layout and what it "
            "sends in lowering/collectives.py"
        )
    return KINDS[name]


def named(wanted: Callable[[Kind], bool]) -> frozenset[str]:
    """Returns the names of the kinds that have a property: `named(lambda kind: kind.cheap)`."""
    return frozenset(kind.name for kind in KINDS.values() if wanted(kind))


def _declare(names: str, flops: Flops, fusion: Fusion = Fusion.ALONE, **facts: bool | str) -> None:
    for name in names.split():
        if name in KINDS:
            raise ValueError(f"instruction `{name}` is declared twice")
        KINDS[name] = Kind(name, flops, fusion, **facts)  # type: ignore[arg-type]


VIEW, PASSING, REDUCTION, PRODUCT, _ = Fusion
none, per_operand = arithmetic.none, arithmetic.per_operand


def of_elementwise(primitive: Primitive) -> Kind:
    """Returns what follows from the statement of an elementwise operation."""
    return Kind(
        primitive.name,
        arithmetic.per_result if primitive.work > Work.NONE else none,
        PASSING,
        cheap=primitive.name == "cast",
        costly=primitive.work >= Work.DIVISION,
        symbol=primitive.symbol,
        elementwise=True,
    )


KINDS.update((name, of_elementwise(primitive)) for name, primitive in ELEMENTWISE.items())

# Collectives, and the one local instruction of resharding.
_declare(" ".join(COLLECTIVES), none, own_line=True)
_declare("slice", none, reads_part=True, cheap=True, own_line=True)

# Data made of nothing, moved, or looked at in another way.
_declare("rename reshape", none, VIEW, cheap=True)
_declare("barrier", none, VIEW, cheap=True, own_line=True)
_declare("full iota device_index", none, PASSING, constant=True)
_declare("literal", none, constant=True)
_declare("broadcast transpose", none, PASSING, cheap=True)
_declare("window", none, PASSING, elsewhere=True, reads_part=True)
_declare("local_slice", none, PASSING, elsewhere=True, reads_part=True, along="dim")
_declare("local_update update", none, in_place=True, along="dim")
_declare("concat assemble", none, along="dim")
_declare("take", none, reads_part=True, along="dim")

# Products.
_declare("einsum", arithmetic.einsum, PRODUCT, long=True)
_declare("convolve", arithmetic.convolution, PRODUCT, long=True)
_declare("attention", arithmetic.attention, long=True)
_declare("attention_gradient", arithmetic.attention_gradient, long=True)
_declare("window_sum window_max window_match", arithmetic.windows, as_fast_as_memory=True)
_declare("cholesky eigh qr slogdet solve svd triangular_solve", arithmetic.factorization)
_declare("fft ifft rfft irfft", arithmetic.transform, along="dim")

# Reductions, order and what is cumulative.
_declare("sum max min", per_operand, REDUCTION, as_fast_as_memory=True, along="over")
_declare("prod", per_operand, as_fast_as_memory=True, along="over")
_declare("prod_others scaled_prod", per_operand)
_declare("scatter_add scatter_max scatter_min", per_operand, as_fast_as_memory=True, along="dim")
_declare("cumsum cumprod cummax cummin", per_operand, as_fast_as_memory=True, along="dim")
_declare("cumprod_from", per_operand)
_declare("linear_recurrence", arithmetic.recurrence, as_fast_as_memory=True, along="dim")
_declare("linear_recurrence_from recurrence_totals", arithmetic.recurrence)
_declare("products_before products_besides scale states_before", none)
_declare("argmax argmin sort top_k", none, along="dim")

# Random bits, and functions of a user's own.
_declare("threefry2x32 local", none)
_declare("print", none, effect=True)

# Instructions with bodies, whose work counts apart.
_declare("cond scan while", none, long=True, own_line=True)
