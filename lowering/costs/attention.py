"""The simulated time of attention on one device.

A fused kernel takes what a table says, where one fits. Without a kernel, blocks of scores take what
a table says, or else what their products take. Few scores are one block: they go to memory.
"""

from __future__ import annotations

from meshdsl.layouts.costs import ELEMENTWISE, Costs, visible_scores
from meshdsl.lowering.attention_sizes import SCORES, AttentionSizes
from meshdsl.lowering.parameters import Attention, parameters_of
from meshdsl.lowering.program import Instruction

PRODUCTS = {"attention": (1, 1), "attention_gradient": (2, 3)}  # into scores, and from them
_MASKS_OF_KERNELS = {"segments", "memory_segments"}
_POSITIONS = {"positions", "memory_positions"}
_PASSES_OVER_SCORES = 3  # they are written, and read for their sum and for the next product


def attention_seconds(costs: Costs, instruction: Instruction, own: bool) -> float:
    """Returns the time of attention, or of its gradient.

    Args:
        own: whether a gradient that is one block computes the scores itself, instead of reading
            those of an attention beside it.
    """
    sizes, gradient = AttentionSizes.of(instruction), instruction.op == "attention_gradient"
    wide = max(sizes.features.size, sizes.values.volume)
    seconds = _of_kernel(costs, instruction, sizes)
    if seconds is not None:
        return seconds
    rows, columns = sizes.blocks
    if not sizes.at_once:
        shown = _shown(instruction, sizes)
        seconds = costs.scores(shown, rows, columns, wide, gradient=gradient)
        if seconds is not None:
            return seconds
    width = instruction.inputs[0].dtype.itemsize
    count, features = sizes.scores / (rows * columns), sizes.features.size
    into_scores = costs.product(rows, features, columns, width, count)
    from_scores = costs.product(rows, columns, features, width, count)
    of_scores, of_features = PRODUCTS[instruction.op]
    if not sizes.at_once:
        return of_scores * into_scores + of_features * from_scores
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


def _shown(instruction: Instruction, sizes: AttentionSizes) -> int:
    """Returns the scores in the blocks that are not all hidden, on the slowest device."""
    params = parameters_of(instruction, Attention)
    if params["offset"] or not _POSITIONS.isdisjoint(params["given"]):
        return sizes.scores  # some device may see all
    rows, columns = sizes.rows.size, sizes.columns.size
    side = min(sizes.blocks)
    return sizes.lead.volume * visible_scores(
        rows, columns, side, params["causal"], params["window"]
    )
