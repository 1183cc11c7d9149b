"""Mixture of experts: each token visits the few of many experts that its router has chosen.

Tokens are routed within their sequence, so a layout that splits the batch keeps all of this local.
The dim `routed` counts the experts while tokens still have the layout of the batch. Renaming it to
the `experts` of the parameters moves tokens between devices. With

    batch:data+expert?; experts:expert

that is one all_to_all on the way there, one back, and as many in the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax

import meshdsl as md
from meshdsl.nn.routing import Routing
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike

_Run: TypeAlias = Callable[[md.Tensor], md.Tensor]


@operation
def places(routing: Routing, over: DimLike = "length") -> md.Tensor:
    """Returns the places of tokens in the queues of their experts: int32 [..., over, choice].

    All first choices come before all second ones, each in the order of `over` (Lepikhin et al.
    2021, "GShard", algorithm 1).
    """
    chosen = _chosen(routing)
    better = md.cumsum(md.sum(chosen, over), "choice", exclusive=True)
    return md.sum((md.cumsum(chosen, over, exclusive=True) + better) * chosen, "routed")


@operation
def moe(
    x: md.Tensor,
    routing: Routing,
    experts: Callable[[md.Tensor], md.Tensor],
    slots: int | None = None,
    over: DimLike = "length",
    dispatch: Literal["einsum", "gather", "sort"] = "einsum",
) -> md.Tensor:
    """Returns the weighted sum of the chosen experts' results for each token.

    `nn.moe(x, nn.route(x, router, 2), lambda x: nn.mlp(x, w_in, w_out))`, where the weights have
    the dim `experts`.

    Args:
        x: [..., over, embed].
        experts: from [..., experts, slots, embed] to the same, each expert with its own
            parameters: those with the dim `experts`. Empty slots hold zeros.
        slots: how many tokens of a sequence an expert takes; later ones in its queue are dropped.
            None: as many as there are, so that none is dropped.
        over: the dim of the tokens of a sequence.
        dispatch: how tokens get to slots and back. "einsum": by products with one-hot tensors.
            "gather": by looking them up. "sort": tokens are sorted by expert into blocks of
            `slots` tokens, each for one expert. Then nothing is dropped and few slots are empty.
            Blocks look up the parameters of their experts, so no layout should split these by
            `experts`.

    Returns:
        The dims of x. A token dropped by all of its experts gets zeros.

    Raises:
        ValueError: an unknown `dispatch`; or with "sort", `experts` that are no tree of parameters.
    """
    length = x.shape.get(over)
    if dispatch == "sort":
        return _sorted(x, routing, experts, slots, length).transpose(x.shape)
    ways = {"einsum": _by_einsum, "gather": _by_gather}
    if dispatch not in ways:
        raise ValueError(f"dispatch={dispatch!r}: choose from einsum, gather, sort")
    slot = Dimension("slots", min(slots or length.size, length.size))

    def run(tokens: md.Tensor) -> md.Tensor:
        return experts(tokens.rename(routed="experts")).rename(experts="routed")

    return ways[dispatch](x, routing, run, slot, length).transpose(x.shape)


def _chosen(routing: Routing) -> md.Tensor:
    """Returns where tokens go as one-hot bits: int32 [..., choice, routed]."""
    return md.one_hot(routing.expert, Dimension("routed", routing.experts), "int32")


def _by_einsum(
    x: md.Tensor, routing: Routing, run: _Run, slot: Dimension, length: Dimension
) -> md.Tensor:
    where = md.cast(_chosen(routing), x.dtype)
    seated = md.cast(md.one_hot(places(routing, length), slot), x.dtype)
    made = run(md.einsum(x, md.einsum(where, seated, over="choice"), over=length))
    weighted = where * md.cast(routing.weight, x.dtype)
    back = md.einsum(weighted, seated, over="choice")
    return md.einsum(made, back, over=["routed", slot])


def _by_gather(
    x: md.Tensor, routing: Routing, run: _Run, slot: Dimension, length: Dimension
) -> md.Tensor:
    parts = [Dimension("routed", routing.experts), slot]
    seat = Dimension("seat", routing.experts * slot.size)
    place = places(routing, length)
    # One past the last seat means none: look-ups there give zeros.
    seats = md.where(place < slot.size, routing.expert * slot.size + place, seat.size)
    front = routing.expert.shape.without(["choice", length.name])
    nobody = md.full([*front, seat], length.size, "int32")
    sitting = md.scatter(nobody, seats, md.arange(length), seat, "min")
    made = run(md.take(x, sitting, length).split(seat, parts))
    results = md.take(made.merge(parts, seat), seats, seat)
    return md.einsum(results, md.cast(routing.weight, x.dtype), over="choice")


def _sorted(
    x: md.Tensor,
    routing: Routing,
    experts: Callable[[md.Tensor], md.Tensor],
    slots: int | None,
    length: Dimension,
) -> md.Tensor:
    """Dropless, in blocks of one expert each (Gale et al. 2023, "MegaBlocks", section 4)."""
    if not all(isinstance(leaf, md.Tensor) for leaf in jax.tree.leaves(experts)):
        raise ValueError(
            "dispatch='sort' looks the experts' parameters up: give a md.Module that holds them"
        )
    count = routing.experts
    tokens = routing.expert.merge(["choice", length.name], "assignment")
    total = tokens.shape.get("assignment").size
    slot = Dimension("slots", slots or -(-total // (4 * count)))
    block = Dimension("block", total // slot.size + count)
    sizes = md.sum(_chosen(routing), ["choice", length])
    begin = md.cumsum(sizes, "routed", exclusive=True)
    blocks = (sizes + (slot.size - 1)) // slot.size
    last = md.cumsum(blocks, "routed")
    number = md.arange(block)
    # Blocks beyond the last expert's belong to none; look-ups of expert `count` give zeros.
    expert = md.sum(md.cast(md.outer(md.less_equal, last, number), "int32"), "routed")
    first = (number - md.take(last - blocks, expert, "routed")) * slot.size
    place = md.outer(md.add, first, md.arange(slot))
    filled = place < md.take(sizes, expert, "routed")
    order = md.argsort(tokens, "assignment")
    at = md.where(filled, md.take(begin, expert, "routed") + place, total)
    assignment = md.where(filled, md.take(order, at, "assignment"), total)
    token = md.where(filled, assignment % length.size, length.size)

    def run(_: None, one: tuple[md.Tensor, md.Tensor]) -> tuple[None, md.Tensor]:
        tokens_of_block, expert = one
        return None, jax.tree.map(lambda w: md.take(w, expert, "experts"), experts)(tokens_of_block)

    _, made = md.scan(run, None, (md.take(x, token, length), expert), dim=block)
    weight = routing.weight.merge(["choice", length.name], "assignment")
    weighted = made * md.cast(md.take(weight, assignment, "assignment"), x.dtype)
    return md.scatter(md.zeros(x.shape, x.dtype), token, weighted, length, "add")
