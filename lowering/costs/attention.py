"""The simulated time of attention on one device.

A fused kernel takes what a table says, where one fits. Without a kernel, blocks of scores take what
a table says. Else the products are counted, and what the scores move: one block is written to
memory and read again.
"""

from __future__ import annotations

from meshdsl.layouts.costs import ELEMENTWISE, Costs, visible_scores
from meshdsl.lowering.attention_sizes import SCORES, SHORTEST, AttentionSizes
from meshdsl.lowering.parameters import Attention, parameters_of
from meshdsl.lowering.program import Instruction

PRODUCTS = {"attention": (1, 1), "attention_gradient": (2, 3)}  # into scores, and from them
_MASKS_OF_KERNELS = {"segments", "memory_segments"}
_POSITIONS = {"positions", "memory_positions"}
_PASSES_OVER_SCORES = 3  # they are written, and read for their sum and for the next product


def attention_seconds(
    costs: Costs, instruction: Instruction, own: bool, least: bool = False
) -> float:
    """Returns the time of attention, or of its gradient.

    Args:
        own: whether a gradient that is one block computes the scores itself, instead of reading
            those of an attention beside it.
        least: whether a bound is wanted, of any share of the scores. That of a device may be one
            block where all of them are several, or several blocks of another size.
    """
    sizes, gradient = AttentionSizes.of(instruction), instruction.op == "attention_gradient"
    seconds = _of_kernel(costs, instruction, sizes)
    if seconds is not None:
        return seconds
    rows, columns = sizes.blocks
    if not sizes.at_once:
        wide = max(sizes.features.size, sizes.values.volume)
        shown = _computed(instruction, sizes, least)
        seconds = costs.scores(shown, rows, columns, wide, gradient=gradient, least=least)
        if seconds is not None and not least:
            return seconds
    width = instruction.inputs[0].dtype.itemsize
    count, features = sizes.scores / (rows * columns), sizes.features.size
    into_scores = costs.product(rows, features, columns, width, count)
    from_scores = costs.product(rows, columns, features, width, count)
    of_scores, of_features = PRODUCTS[instruction.op]
    if not sizes.at_once:
        of_products = of_scores * into_scores + of_features * from_scores
        return of_products if seconds is None else min(seconds, of_products)
    moved = _PASSES_OVER_SCORES * sizes.scores * SCORES.itemsize
    if own and gradient:
        into_scores *= 2
    return into_scores + of_features * from_scores + costs.moved(ELEMENTWISE, moved)


def _of_kernel(costs: Costs, instruction: Instruction, sizes: AttentionSizes) -> float | None:
    """Returns the time of attention in a fused kernel; None: there is none that fits."""
    params = parameters_of(instruction, Attention)
    if not set(params["given"]) <= _MASKS_OF_KERNELS or sizes.chosen is not None:
        return None
    return costs.attention(
        sizes.lead.volume,
        sizes.rows.size,
        sizes.columns.size,
        max(sizes.features.size, sizes.values.volume),
        causal=params["causal"],
        window=params["window"],
        gradient=instruction.op == "attention_gradient",
    )


def _computed(instruction: Instruction, sizes: AttentionSizes, least: bool) -> int:
    """Returns the scores that the slowest device computes: blocks that are not all hidden.

    Args:
        least: whether to count the smallest blocks, without pads.
    """
    params = parameters_of(instruction, Attention)
    causal, window = params["causal"], params["window"]
    if params["offset"] or not _POSITIONS.isdisjoint(params["given"]):
        causal, window = False, None  # some device may see all
    rows, columns = sizes.rows.size, sizes.columns.size
    if not least:
        computed = visible_scores(rows, columns, *sizes.blocks, causal, window)
    elif not causal and window is None:
        computed = rows * columns
    else:
        side = min(SHORTEST, rows, columns)
        all_blocks = -(-rows // side) * -(-columns // side) * side**2
        computed = visible_scores(rows, columns, side, side, causal, window)
        computed = computed * rows * columns // all_blocks
    return sizes.lead.volume * computed
