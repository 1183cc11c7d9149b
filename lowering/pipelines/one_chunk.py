"""Schedules with one chunk per stage: GPipe, and one forward one backward (1F1B).

There are p stages and m microbatches. A forward pass takes the time F, a backward pass the time B.
Both schedules take (m + p - 1)(F + B). So the bubble is (p - 1)(F + B), which is the share
(p - 1)/(m + p - 1) of the time. The schedules differ in how many activations a stage keeps.
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
    """Returns 1F1B: a stage does each backward pass as early as possible.

    Source: PipeDream-Flush, in Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", section 2.2.1 and figure 4 (top).

    In the warm-up, stage i of p does min(m, p - 1 - i) forward passes. In the steady state, it
    alternates between one forward and one backward pass. In the cool-down, it does the remaining
    backward passes. It keeps the activations of at most min(m, p - i) microbatches.
    """
    rows = []
    for stage in range(stages):
        ahead = min(microbatches, stages - 1 - stage)
        forwards = [forward(stage, k) for k in range(microbatches)]
        backwards = [backward(stage, k) for k in range(microbatches)]
        rows.append(alternate(forwards, backwards, ahead))
    return Schedule.of(rows, "1f1b")


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Returns a row in three parts: warm-up, steady state and cool-down.

    Args:
        forwards: all forward passes of the stage, in order.
        backwards: all backward passes of the stage, in order.
        ahead: the number of forward passes in the warm-up.
    """
    row = forwards[:ahead]
    pairs = zip(forwards[ahead:], backwards, strict=False)
    row += [action for pair in pairs for action in pair]
    return row + backwards[len(forwards) - ahead :]
