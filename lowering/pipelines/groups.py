"""Groups of microbatches: the order of the microbatches on a stage with several chunks.

The order is depth first. A stage computes its first chunk for a group of microbatches, then its
second chunk for the same group, and so on. Then it continues with the next group. The backward
passes use the same order of groups, and the reverse order of chunks in each group.

A group must have at least as many microbatches as there are stages. If it has fewer, a stage waits
until the group comes back to it. In the paper, all groups have exactly that size, so the number of
microbatches must be a multiple of it. Here the sizes of groups differ by at most one, so the number
of microbatches is arbitrary.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2.
"""

from __future__ import annotations


def group_sizes(microbatches: int, groups: int) -> tuple[int, ...]:
    """Returns the sizes of groups: they differ by at most one, and the larger ones are first.

    group_sizes(10, 3)  # (4, 3, 3)
    """
    size, larger = divmod(microbatches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def fewest_ticks(stages: int, microbatches: int) -> int:
    """Returns the number of groups that needs the fewest ticks: groups of at least `stages`."""
    return max(1, microbatches // stages)


def fewest_live(stages: int, microbatches: int) -> int:
    """Returns the number of groups with which no group is larger than the number of stages."""
    return -(-microbatches // stages)


def depth_first(microbatches: int, rounds: int, groups: int) -> list[tuple[int, int]]:
    """Returns (round, microbatch) of the forward passes of a stage, in order.

    The backward passes have the same order, with round `rounds - 1 - r` instead of r.
    """
    order: list[tuple[int, int]] = []
    first = 0
    for size in group_sizes(microbatches, groups):
        order += [(r, first + j) for r in range(rounds) for j in range(size)]
        first += size
    return order
