"""Zero-bubble schedules: gradients of weights fill the time in which a stage would wait.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241). The paper splits the
backward pass into the gradients of inputs, which the stage before waits for, and those of weights,
which no one waits for. It calls them B and W. Here they are I and W, as in PyTorch's notation.

A chunk's activations are kept until its `W` has ended. After its `I` a part of them may be freed.
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import Action, forward, inputs, weights
from meshdsl.lowering.pipelines.schedule import Schedule


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Returns ZB-H1: the order of 1F1B with each `W` delayed, in the memory of 1F1B.

    Source: Qi et al. 2023, section 2.1 and figure 3 (top).

    Stage i of p begins with p - 1 - i forward passes, as in 1F1B. Then it alternates F, I and W,
    where W is i microbatches behind I. So each stage keeps the activations of min(m, p)
    microbatches, as many as the first stage of 1F1B does.

    With m >= p, W <= F and W <= I, the time is m(F + I + W) + (p - 1)(F + I - W). 1F1B has
    (p - 1)(F + I + W) there: for equal times, the bubble is a third of that (table 2 of the paper).
    """
    rows = []
    for stage in range(stages):
        ahead = min(microbatches, stages - 1 - stage)
        row = [forward(stage, k) for k in range(ahead)]
        for k in range(microbatches):
            row += [forward(stage, ahead + k)] if ahead + k < microbatches else []
            row.append(inputs(stage, k))
            row += [weights(stage, k - stage)] if k >= stage else []
        row += [weights(stage, k) for k in range(max(0, microbatches - stage), microbatches)]
        rows.append(row)
    return Schedule.of(rows, "zb-h1")


def zbv(stages: int, microbatches: int) -> Schedule:
    """Returns ZB-V: two chunks per stage in the shape of a V, and no bubble if F = I = W.

    Source: Qi et al. 2023, section 6 and figure 6. PyTorch calls it ZBVZeroBubble.

    Stage i of p has chunk i on the way down and chunk 2p - 1 - i on the way up: the last stage has
    two chunks in a row, and the first one has both ends of the model. No stage keeps more than 2p
    inputs of chunks: of chunks half as large as those of 1F1B, this is the memory of 1F1B.

    With F = I = W = t of a chunk, and m >= 2p - 1, stage i works from time i t without a pause for
    6 m t. So no stage waits once it has begun. The makespan is (6m + p - 1) t. With other times,
    stages wait.

    The phases of stage i, where `a` is its first chunk and `b` its second one:

    1. `aF` until microbatch 0 comes back: 2(p - i) - 1 times;
    2. `bF aF`: i times;
    3. `bF bI bW`: p - i times, until `aI` of microbatch 0 can begin;
    4. `aF aI aW bF bI bW`, without `aF` where none is left;
    5. `aI bI`: i times; no one waits for their `W`;
    6. `aI aW`: p - i times; then all other `bW`, and all other `aW`.

    Fewer than 2p - 1 microbatches have the order of 2p - 1 without the absent ones.
    """
    total = max(microbatches, 2 * stages - 1)
    rows = []
    for stage in range(stages):
        near_end = stages - stage
        text = "aF " * (2 * near_end - 1) + "bF aF " * stage + "bF bI bW " * near_end
        both = total - (2 * stages - stage - 1)
        text += "aF aI aW bF bI bW " * both + "aI aW bF bI bW " * (total - stages - both)
        text += "aI bI " * stage + "aI aW " * near_end + "bW " * stage + "aW " * stage
        chunks = {"a": stage, "b": 2 * stages - 1 - stage}
        rows.append(_numbered(text.split(), chunks, microbatches))
    return Schedule.of(rows, "zbv")


def _numbered(words: list[str], chunks: dict[str, int], microbatches: int) -> list[Action]:
    """Returns actions of words such as `aF`, each of which counts its microbatches."""
    makers = {"F": forward, "I": inputs, "W": weights}
    count = dict.fromkeys(words, 0)
    row = []
    for word in words:
        if count[word] < microbatches:
            row.append(makers[word[1]](chunks[word[0]], count[word]))
        count[word] += 1
    return row
