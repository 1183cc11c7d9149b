"""Interleaved 1F1B: several chunks per stage, so that the bubble is divided by their number.

There are p stages with v chunks each. Chunk c is on stage c mod p. A microbatch visits each stage v
times.
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import backward, forward
from meshdsl.lowering.pipelines.groups import depth_first, fewest_ticks, group_sizes
from meshdsl.lowering.pipelines.one_chunk import alternate, one_forward_one_backward
from meshdsl.lowering.pipelines.schedule import Schedule


def interleaved(stages: int, microbatches: int, rounds: int) -> Schedule:
    """Returns the interleaved schedule of v rounds; with one round, this is 1F1B.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", section 2.2.2 and figure 4 (bottom). In the paper, m must be a multiple of
    p. Here m is arbitrary: `groups.py` makes groups of p or more microbatches. PyTorch uses the
    same groups, but requires that the number of groups divides m.

    A forward pass of one chunk takes the time F, a backward pass the time B. If m >= p, the
    schedule takes (v m + p - 1)(F + B), and the bubble is the share (p - 1)/(v m + p - 1). If
    m < p, it takes (v p + m - 1)(F + B), because a stage waits until the microbatches come back.

    Let G be the size of the largest group: G = p if p divides m. With v >= 2 rounds, stage i does
    min(v m, (v - 1) G + 2(p - 1 - i)) forward passes in the warm-up. It keeps the inputs of at
    most min(v m, (v - 1) G + 2(p - i) - 1) chunks.
    """
    if rounds == 1:
        return one_forward_one_backward(stages, microbatches)
    groups = fewest_ticks(stages, microbatches)
    order = depth_first(microbatches, rounds, groups)
    largest = group_sizes(microbatches, groups)[0]
    rows = []
    for stage in range(stages):
        ahead = min(len(order), (rounds - 1) * largest + 2 * (stages - 1 - stage))
        forwards = [forward(r * stages + stage, k) for r, k in order]
        backwards = [backward((rounds - 1 - r) * stages + stage, k) for r, k in order]
        rows.append(alternate(forwards, backwards, ahead))
    return Schedule.of(rows, "interleaved")
