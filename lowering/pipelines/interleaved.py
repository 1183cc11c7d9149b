"""Interleaved 1F1B: several chunks per stage, so that the bubble is divided by their number.

Chunk c of p v chunks is on stage c mod p. A microbatch goes v times around the stages.
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import backward, forward
from meshdsl.lowering.pipelines.groups import depth_first, fewest_ticks, group_sizes
from meshdsl.lowering.pipelines.one_chunk import alternate, one_forward_one_backward
from meshdsl.lowering.pipelines.schedule import Schedule


def interleaved(stages: int, microbatches: int, rounds: int) -> Schedule:
    """Returns the interleaved schedule of v rounds; that of one round is 1F1B.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", section 2.2.2 and figure 4 (bottom). The paper wants m to be a multiple of
    p; here m is any number, in groups of p or more microbatches (`groups.py`). PyTorch's has the
    same groups, but refuses m that the number of groups does not divide.

    Of p stages, m >= p microbatches, and times F and B of one chunk, the time is
    (v m + p - 1)(F + B), and the bubble (p - 1)/(v m + p - 1) of it. Of m < p it is
    (v p + m - 1)(F + B): a stage waits until the microbatches come back.

    With groups of at most G microbatches (G = p if p divides m), stage i of v >= 2 rounds begins
    with min(v m, (v - 1) G + 2(p - 1 - i)) forward passes, and then alternates. It keeps the
    inputs of min(v m, (v - 1) G + 2(p - i) - 1) chunks.
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
