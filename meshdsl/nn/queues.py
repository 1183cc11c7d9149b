"""Queues of tokens: which place a token has in the queue of each of its experts.

Tokens are routed within their sequence, so a layout that splits the batch keeps all of this local.
"""

from __future__ import annotations

from dataclasses import replace

import meshdsl as md
from meshdsl.nn.routing import Routing
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike


@operation
def places(routing: Routing, over: DimLike = "length") -> md.Tensor:
    """Returns the places of tokens in the queues of their experts: int32 [..., over, choice].

    All first choices come before all second ones, each in the order of `over` (Lepikhin et al.
    2021, "GShard", algorithm 1).
    """
    where = chosen(routing)
    better = md.cumsum(md.sum(where, over), "choice", exclusive=True)
    return md.sum((md.cumsum(where, over, exclusive=True) + better) * where, "routed")


def chosen(routing: Routing) -> md.Tensor:
    """Returns where tokens go as one-hot bits: int32 [..., choice, routed]."""
    return md.one_hot(routing.expert, Dimension("routed", routing.experts), "int32")


def seated_at(
    routing: Routing, slot: Dimension, length: Dimension
) -> tuple[md.Tensor, Dimension, md.Tensor]:
    """Seats tokens in the slots of their experts.

    Returns:
        The seat of each choice of a token, int32 [..., length, choice]; the dim of the seats, which
        are the slots of one expert after the other; and the token on each seat, int32 [..., seat].
        The number past the last means none: look-ups there give zeros.
    """
    seat = Dimension("seat", routing.experts * slot.size)
    place = places(routing, length)
    seats = md.where(place < slot.size, routing.expert * slot.size + place, seat.size)
    front = routing.expert.shape.without(["choice", length.name])
    nobody = md.full([*front, seat], length.size, "int32")
    return seats, seat, md.scatter(nobody, seats, md.arange(length), seat, "min")


def by_peer(routing: Routing, peers: int) -> Routing:
    """Returns the routing to the peers that have the experts."""
    return replace(routing, expert=routing.expert // (routing.experts // peers), experts=peers)


@operation
def dropped_choices(
    routing: Routing, slots: int, over: DimLike = "length", peers: int | None = None
) -> md.Tensor:
    """Returns the share of the tokens' choices that `nn.moe` drops, as float32 without dims.

        routing = nn.route(x, router, 2)
        y = nn.moe(x, routing, experts, slots=40)
        share = nn.dropped_choices(routing, slots=40)  # 0.05: 5 % of the choices have no slot

    Args:
        slots, over: as for `nn.moe`.
        peers: as for `nn.moe` with dispatch="sort"; None with the other ways.

    Raises:
        ValueError: the experts do not divide among the peers.

    Examples:
        >>> x = md.ones(md.dims(length=4, embed=2))
        >>> router = md.named([[1.0, 0.0], [0.0, 0.0]], ["embed", "routed"])  # all to the first
        >>> routing = md.nn.route(x, router, choices=1)
        >>> print(md.nn.dropped_choices(routing, slots=3))
        f32[] 0.25
    """
    if peers is not None and (peers < 1 or routing.experts % peers):
        raise ValueError(f"{routing.experts} experts do not divide among peers={peers}")
    queues = routing if peers is None else by_peer(routing, peers)
    return md.mean(md.cast(places(queues, over) >= slots, "float32"))
