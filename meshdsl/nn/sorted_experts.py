"""Experts by sorting: the tokens of one expert are multiplied together, without slots for each.

A device that has all experts needs no exchange. Otherwise the experts are divided among *peers*,
which follow each other along the dim `experts`, so that a layout puts each peer on devices of its
own. Inside of a peer, tokens find their experts by `md.grouped_einsum`. Tokens get to peers in one
of two ways:

- All of them go to all peers, and each peer computes what it was chosen for. Nothing is dropped.
  Where `experts` is split, tokens are gathered, and results are reduce-scattered.
- With `slots`, a peer takes so many choices of each sequence, of all its experts together.
  Where `experts` is split, that is one all_to_all there, and one back. What comes later in the
  queue is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

import meshdsl as md
from meshdsl.nn.queues import by_peer, seated_at
from meshdsl.nn.routing import Routing
from meshdsl.tensors.dims import Dimension

Experts = Callable[[md.Tensor], md.Tensor]


def by_sorting(
    x: md.Tensor,
    routing: Routing,
    experts: Experts,
    peers: int,
    slots: int | None,
    length: Dimension,
) -> md.Tensor:
    """Returns the weighted sum of the chosen experts' results (Gale et al. 2023, "MegaBlocks").

    Raises:
        ValueError: `experts` is no tree of parameters; `peers` and `slots` do not fit.
    """
    problems = []
    if not all(isinstance(leaf, md.Tensor) for leaf in jax.tree.leaves(experts)):
        problems.append(
            "dispatch='sort' looks the experts' parameters up: give a md.Module that holds them"
        )
    if peers < 1 or routing.experts % peers:
        problems.append(f"{routing.experts} experts do not divide among peers={peers}")
    elif peers == 1 and slots is not None:
        problems.append(f"dispatch='sort' with peers=1 drops nothing; leave slots={slots} out")
    if problems:
        raise ValueError("; ".join(problems))
    if peers == 1:
        made = _looked_up(experts, routing.expert, "experts")(x)
        return md.einsum(made, md.cast(routing.weight, x.dtype), over="choice")
    group, each = md.dims(experts=peers, of_peer=routing.experts // peers)
    apart = jax.tree.map(
        lambda w: md.split(w, "experts", [group, each]) if w.shape.find("experts") else w, experts
    )
    if slots is None:
        return _at_all_peers(x, routing, apart, group, each)
    choices = routing.expert.shape.get("choice").size
    slot = Dimension("slots", min(slots, length.size * min(choices, each.size)))
    return _in_queues(x, routing, apart, group, each, slot, length)


def _looked_up(experts: Experts, expert: md.Tensor, dim: str) -> Experts:
    """Returns the experts with each token's own parameters, which `md.einsum` does not copy."""
    looked_up: Experts = jax.tree.map(
        lambda w: md.take(w, expert, dim) if w.shape.find(dim) else w, experts
    )
    return looked_up


def _at_all_peers(
    x: md.Tensor, routing: Routing, experts: Experts, peers: Dimension, each: Dimension
) -> md.Tensor:
    """Has every peer compute its own of each token's choices; none has more than it has experts."""
    here = md.outer(md.equal, routing.expert // each.size, md.arange(peers))
    own = md.where(here, routing.expert % each.size, -1)
    weight = md.where(here, routing.weight, 0)
    choices = routing.expert.shape.get("choice")
    if each.size < choices.size:
        own, at = md.top_k(own, each.size, "choice", "choice")
        weight = md.take_along(weight, at, "choice")
    expert_out = _looked_up(experts, own, each.name)(x)
    combined = md.einsum(expert_out, md.cast(weight, x.dtype), over=["choice", peers.name])
    return combined


def _in_queues(
    x: md.Tensor,
    routing: Routing,
    experts: Experts,
    peers: Dimension,
    each: Dimension,
    slot: Dimension,
    length: Dimension,
) -> md.Tensor:
    """Sends tokens to the queues of their peers, and their results back."""
    seats, seat, sitting = seated_at(by_peer(routing, peers.size), slot, length)
    front = [dim for dim in sitting.shape if dim.name != seat.name]
    nobody = md.full([*front, seat], -1, "int32")
    own = md.scatter(nobody, seats, routing.expert % each.size, seat, "max")
    rooms = [Dimension("routed", peers.size), slot]
    dispatched = md.take(x, sitting, length).split(seat, rooms).rename(routed=peers.name)
    expert = own.split(seat, rooms).rename(routed=peers.name)
    expert_out = _looked_up(experts, expert, each.name)(dispatched).rename({peers.name: "routed"})
    results = md.take(expert_out.merge(rooms, seat), seats, seat)
    combined = md.einsum(results, md.cast(routing.weight, x.dtype), over="choice")
    return combined
