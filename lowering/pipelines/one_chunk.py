"""Schedules with one chunk per stage: GPipe, and one forward one backward (1F1B).

Of p stages and m microbatches, with times F and B of the forward and the backward pass, both have
the time (m + p - 1)(F + B), and so the bubble (p - 1)(F + B), or (p - 1)/(m + p - 1) of the time.
They differ in the inputs of chunks that a stage keeps for the backward pass.
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import Action, backward, forward
from meshdsl.lowering.pipelines.schedule import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Returns GPipe: all forward passes, then all backward passes, the last microbatch first.

    Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", figure 2c.

    Each stage keeps the activations of all m microbatches.
    """
    every = range(microbatches)
    rows = [
        [*(forward(s, k) for k in every), *(backward(s, k) for k in reversed(every))]
        for s in range(stages)
    ]
    return Schedule.of(rows, "gpipe")


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """Returns 1F1B: a stage does a backward pass as soon as it can.

    Source: PipeDream-Flush, in Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", section 2.2.1 and figure 4 (top).

    Stage i of p begins with min(m, p - 1 - i) forward passes. Then it alternates, one forward pass
    and one backward pass, and ends with the other backward passes. It keeps the activations of
    min(m, p - i) microbatches.
    """
    rows = []
    for stage in range(stages):
        ahead = min(microbatches, stages - 1 - stage)
        forwards = [forward(stage, k) for k in range(microbatches)]
        backwards = [backward(stage, k) for k in range(microbatches)]
        rows.append(alternate(forwards, backwards, ahead))
    return Schedule.of(rows, "1f1b")


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Returns `ahead` forward passes, then one forward and one backward in turns, then the rest."""
    row = forwards[:ahead]
    pairs = zip(forwards[ahead:], backwards, strict=False)
    row += [action for pair in pairs for action in pair]
    return row + backwards[len(forwards) - ahead :]
