"""Instructions: the facts about each kind of instruction of an `SpmdProgram`.

`KINDS` has a declaration per kind: its parameters, its arithmetic, how compilers fuse it, and how
passes may move it. Costs, passes, checks and printing read these facts. `kind_of` raises an error
for a name that is not declared. A declaration needs the record of its parameters and its
arithmetic.

Elementwise kinds come from the operations of the same name (`meshdsl.ops.elementwise`). There are
about 70 others. Many of these are steps of operations that are split over devices: `assemble`,
`local_slice` and `local_update` exchange windows; `recurrence_totals` and `states_before` carry a
linear recurrence from shard to shard; `scaled_prod` and `products_besides` do so for an exact
product.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, is_typeddict

from meshdsl.lowering import parameters as records
from meshdsl.lowering.collectives import COLLECTIVES
from meshdsl.lowering.costs import arithmetic
from meshdsl.lowering.parameters import NoParameters
from meshdsl.ops.elementwise.broadcasting import ELEMENTWISE
from meshdsl.tracing.graph import Primitive, Work

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction

Flops = Callable[["Instruction"], int]


class Fusion(enum.Enum):
    """How a compiler fuses an instruction: which of its values are in memory."""

    VIEW = "its result is its operand, in the same buffer"
    FUSED = "its readers compute its result as they read it, if they can"
    REDUCTION = "it computes operands of fusion FUSED as it reads them"
    PRODUCT = "a single elementwise reader is computed with it"
    ALONE = "it reads its operands from memory, and writes its result there"


@dataclass(frozen=True)
class Kind:
    """The facts about a kind of instruction.

    Attributes:
        parameters: the record of its parameters, from `lowering.parameters`.
        flops: the arithmetic of one device, for differentiable dtypes.
        fusion: how a compiler fuses it.
        moves: each result is the operand of the same number, in another layout or at another time.
        cheap: it only moves or converts data: passes may move it along with a collective.
        long: it runs long enough to hide a collective behind it.
        effect: it does more than compute its results, as printing does.
        in_place: its result is its first operand, with a part of it overwritten or added to.
        elsewhere: an element of the result has another position than the element that it reads, so
            the result cannot be written over the operand.
        reads_part: it reads no more elements of its first operand than its result has.
        as_fast_as_memory: it has arithmetic, which takes no longer than reading its operands.
        along: the parameter that names its dim or dims, for printing.
        constant: it has no operands.
        into_products: a product that reads its result computes it as it reads.
        own_line: it is not folded into a formula when a program is printed.
        costly: it is computed once, not again for every reader.
        symbol: it is printed between its operands, or before its only operand.
        word: the word that it is printed with instead of its name.
        scores: it computes scores of attention, block by block (`lowering.attention_sizes`).
        positionwise: along a dim that its results have and that no parameter names, each position
            comes from the same position of its operands. So parts of that dim can be computed one
            by one, by the same instruction.
        combined: the elementwise kind that combines its results for the parts of a dim that its
            operands have and its results lack.
        elementwise: it comes from an elementwise operation.
    """

    name: str
    parameters: type
    flops: Flops
    fusion: Fusion = Fusion.ALONE
    moves: bool = False
    cheap: bool = False
    long: bool = False
    effect: bool = False
    in_place: bool = False
    elsewhere: bool = False
    reads_part: bool = False
    as_fast_as_memory: bool = False
    along: str = ""
    constant: bool = False
    into_products: bool = False
    own_line: bool = False
    costly: bool = False
    symbol: str = ""
    word: str = ""
    scores: bool = False
    positionwise: bool = False
    combined: str = ""
    elementwise: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not is_typeddict(self.parameters):
            raise ValueError(
                f"instruction `{self.name}` is declared without a record of its parameters: write "
                "a TypedDict in lowering/parameters, or give NoParameters if it has none"
            )
        if not callable(self.flops):
            raise ValueError(
                f"instruction `{self.name}` is declared without its arithmetic: give a function "
                "of lowering/costs/arithmetic.py after its record, or `none` if it has none"
            )

    @property
    def is_collective(self) -> bool:
        """Whether devices exchange data; see `lowering.collectives`."""
        return self.name in COLLECTIVES


KINDS: dict[str, Kind] = {}


def kind_of(name: str) -> Kind:
    """Returns the facts about a kind of instruction: `kind_of("einsum").long`.

    Raises:
        ValueError: it is not declared.
    """
    if name not in KINDS:
        raise ValueError(
            f"instruction `{name}` is not declared: declare its arithmetic and its fusion in "
            "lowering/instructions.py; for a collective, declare how it changes a layout and what "
            "it sends in lowering/collectives.py"
        )
    return KINDS[name]


def kinds_with(has_property: Callable[[Kind], bool]) -> frozenset[str]:
    """Returns the names of the kinds with a property: `kinds_with(lambda kind: kind.cheap)`."""
    return frozenset(kind.name for kind in KINDS.values() if has_property(kind))


def record_of(instruction: Instruction) -> type:
    """Returns the record of an instruction's parameters; joined collectives have their own records.

    Raises:
        ValueError: its kind is not declared.
    """
    if instruction.is_collective and "sources" in instruction.params:
        return COLLECTIVES[instruction.op].joined
    return kind_of(instruction.op).parameters


def _declare(
    names: str,
    parameters: type,
    flops: Flops | None = None,  # `Kind` refuses None: so an error names the instruction
    fusion: Fusion = Fusion.ALONE,
    **facts: bool | str,
) -> None:
    for name in names.split():
        if name in KINDS:
            raise ValueError(f"instruction `{name}` is declared twice")
        KINDS[name] = Kind(name, parameters, flops, fusion, **facts)  # type: ignore[arg-type]


VIEW, FUSED, REDUCTION, PRODUCT, _ = Fusion
none, per_operand = arithmetic.none, arithmetic.per_operand


def of_elementwise(primitive: Primitive) -> Kind:
    """Returns the kind of an elementwise operation, from the facts about its primitive."""
    return Kind(
        primitive.name,
        NoParameters,
        arithmetic.per_result if primitive.work > Work.NONE else none,
        FUSED,
        costly=primitive.work >= Work.DIVISION,
        symbol=primitive.symbol,
        word=primitive.word,
        positionwise=True,
        elementwise=True,
    )


KINDS.update((name, of_elementwise(primitive)) for name, primitive in ELEMENTWISE.items())
KINDS["cast"] = replace(KINDS["cast"], parameters=records.Cast, cheap=True, into_products=True)

# Collectives, and the one local instruction of resharding.
for _name, _collective in COLLECTIVES.items():
    _declare(_name, _collective.parameters, none, moves=True, own_line=True, positionwise=True)
_declare(
    "slice",
    records.SplitDim,
    none,
    moves=True,
    reads_part=True,
    cheap=True,
    own_line=True,
    positionwise=True,
)

# Constants, moved data, and views.
_declare("rename", records.Rename, none, VIEW, cheap=True, positionwise=True)
_declare("reshape", NoParameters, none, VIEW, cheap=True)
_declare("barrier", records.Barrier, none, VIEW, moves=True, cheap=True, own_line=True)
_declare("full", records.Full, none, FUSED, constant=True, positionwise=True)
_declare("iota", NoParameters, none, FUSED, constant=True)
_declare("device_index", records.OverAxes, none, FUSED, constant=True)
_declare("literal", records.Data, none, constant=True)
_declare("broadcast", NoParameters, none, FUSED, cheap=True, into_products=True, positionwise=True)
_declare("transpose", NoParameters, none, FUSED, cheap=True, positionwise=True)
_declare("window", records.Window, none, FUSED, elsewhere=True, reads_part=True, positionwise=True)
_declare(
    "local_slice",
    records.LocalPositions,
    none,
    FUSED,
    elsewhere=True,
    reads_part=True,
    along="dim",
    positionwise=True,
)
_declare(
    "local_update", records.LocalPositions, none, in_place=True, along="dim", positionwise=True
)
_declare("update", records.Update, none, in_place=True, along="dim", positionwise=True)
_declare("concat", records.AlongDim, none, along="dim", positionwise=True)
_declare("assemble", records.Assemble, none, along="dim", positionwise=True)
_declare("take", records.Indexed, none, reads_part=True, along="dim", positionwise=True)
# Adds rows to a table, where `row_sums` says.
_declare("add_rows", records.Indexed, none, in_place=True, along="dim")

# Products.
_declare(
    "einsum", NoParameters, arithmetic.einsum, PRODUCT, long=True, positionwise=True, combined="add"
)
_declare(
    "convolve",
    records.Convolve,
    arithmetic.convolution,
    PRODUCT,
    long=True,
    positionwise=True,
    combined="add",
)
_declare(
    "attention", records.Attention, arithmetic.attention, long=True, scores=True, positionwise=True
)
_declare(
    "attention_gradient",
    records.AttentionGradient,
    arithmetic.attention_gradient,
    long=True,
    scores=True,
    positionwise=True,
)
_declare(
    "window_sum window_max",
    records.Pool,
    arithmetic.windows,
    as_fast_as_memory=True,
    positionwise=True,
)
_declare(
    "window_match",
    records.WindowMatch,
    arithmetic.windows,
    as_fast_as_memory=True,
    positionwise=True,
)
_declare("cholesky slogdet solve", records.Matrices, arithmetic.factorization, positionwise=True)
_declare("eigh qr svd", records.Factors, arithmetic.factorization, positionwise=True)
_declare("triangular_solve", records.Triangular, arithmetic.factorization, positionwise=True)
_declare("fft ifft", records.AlongDim, arithmetic.transform, along="dim", positionwise=True)
_declare("rfft irfft", records.HalfSpectrum, arithmetic.transform, along="dim", positionwise=True)

# Reductions, sorting and cumulative operations.
for _name, _combined in {"sum": "add", "max": "maximum", "min": "minimum"}.items():
    _declare(
        _name,
        records.Reduction,
        per_operand,
        REDUCTION,
        as_fast_as_memory=True,
        along="over",
        positionwise=True,
        combined=_combined,
    )
_declare(
    "prod", records.Reduction, per_operand, as_fast_as_memory=True, along="over", positionwise=True
)
_declare("prod_others scaled_prod", records.Reduction, per_operand)
for _name, _combined in {"add": "add", "max": "maximum", "min": "minimum"}.items():
    _declare(
        f"scatter_{_name}",
        records.Indexed,
        per_operand,
        as_fast_as_memory=True,
        along="dim",
        combined=_combined,
    )
_declare("row_sums", records.RowSums, per_operand, as_fast_as_memory=True, along="dim")
_declare(
    "cumsum cumprod cummax cummin",
    records.Cumulative,
    per_operand,
    as_fast_as_memory=True,
    along="dim",
    positionwise=True,
)
_declare("cumprod_from", records.Cumulative, per_operand)
_declare(
    "linear_recurrence",
    records.Cumulative,
    arithmetic.recurrence,
    as_fast_as_memory=True,
    along="dim",
    positionwise=True,
)
_declare("linear_recurrence_from recurrence_totals", records.Cumulative, arithmetic.recurrence)
_declare("products_before states_before", records.Before, none)
_declare("products_besides", records.Reduction, none)
_declare("scale", NoParameters, none)
_declare("argmax argmin", records.AlongDim, none, along="dim", positionwise=True)
_declare("sort", records.Sort, none, along="dim", positionwise=True)
_declare("top_k", records.TopK, none, along="dim", positionwise=True)

# Random bits, functions of the user's, and printing.
_declare("threefry2x32", records.RandomBits, none)
_declare("local", records.Local, none)
_declare("print", records.Print, none, effect=True)

# Products of rows with the matrices of their groups.
_declare(
    "grouped_einsum grouped_outer",
    records.AlongDim,
    arithmetic.grouped,
    long=True,
    along="dim",
)

# Instructions with bodies; the work of bodies is counted separately.
_declare("cond", records.Cond, none, long=True, own_line=True)
_declare("scan", records.Scan, none, long=True, own_line=True)
_declare("while", records.While, none, long=True, own_line=True)
