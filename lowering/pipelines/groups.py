"""Groups of microbatches: the order in which a stage with several chunks goes through them.

Depth first (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", section 2.2): a stage takes a group of microbatches through its first chunk, the
same group through its second chunk, and so on, then the next group. The backward pass takes the
groups in the same order, and the chunks of each group in reverse.

A group needs at least as many microbatches as there are stages, or a stage waits until the group
comes back to it. The paper has groups of exactly that size, so that the number of microbatches is a
multiple of it. Here the sizes differ by at most one, so any number of microbatches will do.
"""

from __future__ import annotations


def group_sizes(microbatches: int, groups: int) -> tuple[int, ...]:
    """Returns the sizes of groups that differ by at most one, larger ones first.

    group_sizes(10, 3)  # (4, 3, 3)
    """
    size, larger = divmod(microbatches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def fewest_ticks(stages: int, microbatches: int) -> int:
    """Returns into how many groups to divide so that no stage waits for a group to come back."""
    return max(1, microbatches // stages)


def fewest_live(stages: int, microbatches: int) -> int:
    """Returns into how many groups to divide so that none is larger than the number of stages."""
    return -(-microbatches // stages)


def depth_first(microbatches: int, rounds: int, groups: int) -> list[tuple[int, int]]:
    """Returns (round, microbatch) of the forward passes of a stage, in their order.

    The order of the backward passes is the same with round `rounds - 1 - r` for r.
    """
    order: list[tuple[int, int]] = []
    first = 0
    for size in group_sizes(microbatches, groups):
        order += [(r, first + j) for r in range(rounds) for j in range(size)]
        first += size
    return order
