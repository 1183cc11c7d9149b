"""Zero-bubble schedules: a stage computes gradients of weights instead of waiting.

The backward pass has two parts. The gradients of inputs are urgent, because the stage before waits
for them. The gradients of weights are not urgent, because no stage waits for them. The paper calls
the parts B and W. Here they are I and W, as in PyTorch's notation.

A stage keeps the activations of a chunk until the end of `W`. It may free a part of them after `I`.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).
"""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import Action, forward, inputs, weights
from meshdsl.lowering.pipelines.schedule import Schedule


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Returns ZB-H1: the order of 1F1B with each `W` delayed, and the memory of 1F1B.

    Source: Qi et al. 2023, section 2.1 and figure 3 (top).

    In the warm-up, stage i of p does p - 1 - i forward passes, as in 1F1B. Then it repeats F, I and
    W; the microbatch of W is i behind that of I. So each stage keeps the activations of at most
    min(m, p) microbatches, as the first stage of 1F1B does.

    If m >= p, W <= F and W <= I, the schedule takes m(F + I + W) + (p - 1)(F + I - W). The second
    term is the bubble. The bubble of 1F1B is (p - 1)(F + I + W): three times as long if F = I = W
    (table 2 of the paper).
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
    """Returns ZB-V: two chunks per stage in the shape of a V. No stage pauses if F = I = W.

    Source: Qi et al. 2023, section 6 and figure 6. PyTorch calls it ZBVZeroBubble.

    Stage i of p has the chunks i and 2p - 1 - i. So the last stage has two consecutive chunks, and
    the first stage has the first and the last chunk of the model. A stage keeps at most 2p inputs
    of chunks. A chunk is half as large as a chunk of 1F1B, so this is the memory of 1F1B.

    Let F = I = W = t for each chunk, and m >= 2p - 1. Then stage i starts at time i t, and computes
    for 6 m t without a pause. The makespan is (6m + p - 1) t. With other times, stages wait.

    Stage i has these phases; `a` is its first chunk and `b` is its second chunk:

    1. `aF`, 2(p - i) - 1 times: until microbatch 0 comes back;
    2. `bF aF`, i times;
    3. `bF bI bW`, p - i times: until `aI` of microbatch 0 can start;
    4. `aF aI aW bF bI bW`, without `aF` after the last microbatch;
    5. `aI bI`, i times: their `W` is not urgent;
    6. `aI aW`, p - i times; then all remaining `bW`, and all remaining `aW`.

    With fewer than 2p - 1 microbatches, the order is that of 2p - 1 microbatches; actions of the
    absent microbatches are omitted.
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
    """Returns the actions of words such as `aF`: occurrence k of a word is microbatch k."""
    makers = {"F": forward, "I": inputs, "W": weights}
    count = dict.fromkeys(words, 0)
    row = []
    for word in words:
        if count[word] < microbatches:
            row.append(makers[word[1]](chunks[word[0]], count[word]))
        count[word] += 1
    return row
