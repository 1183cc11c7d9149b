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

import meshdsl as md
from meshdsl.nn.queues import chosen, places, seated_at
from meshdsl.nn.routing import Routing
from meshdsl.nn.sorted_experts import by_sorting
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike

_Run: TypeAlias = Callable[[md.Tensor], md.Tensor]


@operation
def moe(
    x: md.Tensor,
    routing: Routing,
    experts: Callable[[md.Tensor], md.Tensor],
    slots: int | None = None,
    over: DimLike = "length",
    dispatch: Literal["einsum", "gather", "sort"] = "einsum",
    peers: int = 1,
) -> md.Tensor:
    """Returns the weighted sum of the chosen experts' results for each token.

    `nn.moe(x, nn.route(x, router, 2), lambda x: nn.mlp(x, w_in, w_out))`, where the weights have
    the dim `experts`.

    Args:
        x: [..., over, embed].
        experts: from [..., experts, slots, embed] to the same, each expert with its own
            parameters: those with the dim `experts`. Empty slots hold zeros.
        slots: how many tokens of a sequence an expert takes; later ones in its queue are dropped.
            None: as many as there are, so that none is dropped. `nn.dropped_choices` counts those
            that are.
        over: the dim of the tokens of a sequence.
        dispatch: how tokens get to slots and back. "einsum": by products with one-hot tensors.
            "gather": by looking them up. "sort": without slots; the tokens of one expert are
            multiplied together (`md.grouped_einsum`). So nothing is dropped, and no product is of
            an empty slot.
        peers: with "sort": into how many parts the experts are divided, each on devices of its
            own. Give the number of devices that a layout splits `experts` over, or a multiple of
            it. With `peers=1`, the parameters of the experts are sent to the tokens; with more, the
            tokens are sent to the peers. Without `slots`, all tokens are sent to all peers, and
            none is dropped. `slots` says how many choices of a sequence a peer takes, for all of
            its experts together.

    Returns:
        The dims of x. A token dropped by all of its experts gets zeros.

    Raises:
        ValueError: an unknown `dispatch`; `slots` below 1; with "sort", `experts` that are no tree
            of parameters, or that do not divide among `peers`, or `slots` without peers; `peers`
            without "sort".

    Examples:
        >>> x = md.named([[1.0, 0.0], [0.0, 1.0]], ["length", "embed"])
        >>> router = md.named([[1.0, 0.0], [0.0, 1.0]], ["embed", "routed"])
        >>> scale = md.named([10.0, 20.0], ["experts"])  # each expert's parameters
        >>> print(md.nn.moe(x, md.nn.route(x, router, choices=1), lambda x: x * scale))
        f32[length=2, embed=2] [[10.  0.]
         [ 0. 20.]]
    """
    length = x.shape.get(over)
    if slots is not None and slots < 1:
        raise ValueError(f"slots={slots}: needs at least 1; None drops nothing")
    if dispatch == "sort":
        return by_sorting(x, routing, experts, peers, slots, length).transpose(x.shape)
    if peers != 1:
        raise ValueError(f"peers={peers} needs dispatch='sort', not {dispatch!r}")
    ways = {"einsum": _by_einsum, "gather": _by_gather}
    if dispatch not in ways:
        raise ValueError(f"dispatch={dispatch!r}: choose from einsum, gather, sort")
    slot = Dimension("slots", length.size if slots is None else min(slots, length.size))

    def run(tokens: md.Tensor) -> md.Tensor:
        return experts(tokens.rename(routed="experts")).rename(experts="routed")

    return ways[dispatch](x, routing, run, slot, length).transpose(x.shape)


def _by_einsum(
    x: md.Tensor, routing: Routing, run: _Run, slot: Dimension, length: Dimension
) -> md.Tensor:
    where = md.cast(chosen(routing), x.dtype)
    seated = md.cast(md.one_hot(places(routing, length), slot), x.dtype)
    there = md.einsum(where, seated, over="choice")
    dispatched = md.einsum(x, there, over=length)
    expert_out = run(dispatched)
    weighted = where * md.cast(routing.weight, x.dtype)
    back = md.einsum(weighted, seated, over="choice")
    combined = md.einsum(expert_out, back, over=["routed", slot])
    return combined


def _by_gather(
    x: md.Tensor, routing: Routing, run: _Run, slot: Dimension, length: Dimension
) -> md.Tensor:
    parts = [Dimension("routed", routing.experts), slot]
    seats, seat, sitting = seated_at(routing, slot, length)
    dispatched = md.take(x, sitting, length).split(seat, parts)
    expert_out = run(dispatched)
    results = md.take(expert_out.merge(parts, seat), seats, seat)
    combined = md.einsum(results, md.cast(routing.weight, x.dtype), over="choice")
    return combined
