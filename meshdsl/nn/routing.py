"""Routers: which experts each token visits, and how much each of them counts.

A router scores every expert for every token and takes the best. Routers differ in the score, in
whether the weights of a token sum to 1, in a limit on the groups (devices) that its experts come
from, and in a bias that balances the choice without a loss:

| router | score | normalise | scale | groups: chosen, by | bias |
|---|---|---|---|---|---|
| Mixtral | softmax | yes | 1 | | |
| DeepSeek-V2 | softmax | no | 16 | 8: 3, by "max" | |
| DeepSeek-V3 | sigmoid | yes | 2.5 | 8: 4, by "top2" | yes |
"""

from __future__ import annotations

import math
from typing import Literal

import meshdsl as md
from meshdsl.nn.precision import at_least_float32
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike

_LEAST = 1e-20  # added to sums of scores; it changes none that is above 1e-12


class RouterLosses(md.Module):
    """Auxiliary losses of a router, to be added to the loss of training with small weights.

    Attributes:
        balance: 1 where experts are used equally, up to their number where one is used for all
            (Fedus et al. 2022, "Switch transformers", equation 4). Scores that are no probabilities
            are divided by their sum over the experts.
        z: the mean square of the logits' log-sum-exp (Zoph et al. 2022, "ST-MoE", equation 5).
        tokens: how many tokens have chosen each expert, int32 [routed], for `balance_bias`. None:
            the router has no bias.
        dropped: the share of the choices that `nn.moe` drops, by `nn.dropped_choices`. None: nobody
            has counted.

    Examples:
        >>> x = md.named([[1.0, 0.0], [0.0, 1.0]], ["length", "embed"])
        >>> router = md.named([[1.0, 0.0], [0.0, 1.0]], ["embed", "routed"])
        >>> losses = md.nn.route(x, router, choices=1).losses
        >>> print(losses.balance, losses.tokens)  # each expert has one token; there is no bias
        f32[] 1. None
    """

    balance: md.Tensor
    z: md.Tensor
    tokens: md.Tensor | None = None
    dropped: md.Tensor | None = None


class Routing(md.Module):
    """Where tokens go: the dim `choice` counts the experts of one token, the best first.

    Attributes:
        expert: the expert's number, int32 [..., choice].
        weight: of its output, [..., choice].
        experts: how many there are.

    Examples:
        >>> x = md.named([[1.0, 0.0], [0.0, 3.0]], ["length", "embed"])
        >>> router = md.named([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], ["embed", "routed"])
        >>> routing = md.nn.route(x, router, choices=2)
        >>> routing.expert.dims, routing.experts
        ([length=2, choice=2], 3)
        >>> print(md.index(routing.expert, "choice", 0))  # the best
        s32[length=2] [0 2]
    """

    expert: md.Tensor
    weight: md.Tensor
    losses: RouterLosses
    experts: int = md.static()


@operation
def route(
    x: md.Tensor,
    router: md.Tensor,
    choices: int,
    over: DimLike = "embed",
    routed: DimLike = "routed",
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    bias: md.Tensor | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    group_score: Literal["max", "top2"] = "max",
) -> Routing:
    """Returns, for each token, the experts with the highest scores, and their weights.

    `nn.route(x, router, 2)` is the router of Mixtral (Jiang et al. 2024, section 2.1), and
    `nn.route(x, router, 6, normalise=False, scale=16.0, groups=8, chosen_groups=3)` that of
    DeepSeek-V2 (DeepSeek-AI 2024, "DeepSeek-V2", sections 2.2.1 and 2.2.2). Scores are computed in
    float32 or wider.

    Args:
        x: [..., embed].
        router: [embed, routed].
        choices: how many experts take part in each token.
        score: of the logits: "softmax" over all experts, or "sigmoid" of each.
        normalise: whether the weights of a token sum to `scale`; else a weight is score * scale.
        bias: [routed], added to the scores for the choice of experts only, not to weights
            (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2). It has no gradient; `balance_bias`
            changes it, once a step.
        groups: how many groups of equal size the experts form, in their order; those of a group
            may share a device.
        chosen_groups: how many groups the experts of a token come from.
        group_score: of a group, its best score ("max"), or the sum of its best two ("top2").

    Raises:
        ValueError: choices, groups and experts do not fit each other; it lists all conflicts.

    Examples:
        >>> x = md.named([[1.0, 0.0], [0.0, 3.0]], ["length", "embed"])
        >>> router = md.named([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], ["embed", "routed"])
        >>> routing = md.nn.route(x, router, choices=2)
        >>> print(routing.expert.dims, md.sum(routing.weight, "choice"))
        [length=2, choice=2] f32[length=2] [1. 1.]
    """
    count = router.shape.get(routed)
    problems = route_misfits(count, choices, groups, chosen_groups, group_score)
    if score not in ("softmax", "sigmoid"):
        problems.append(f"score={score!r}: choose from softmax, sigmoid")
    if not math.isfinite(scale):
        problems.append(f"scale={scale}: needs a finite number")
    if problems:
        raise ValueError("; ".join(problems))
    logits = md.einsum(at_least_float32(x), at_least_float32(router), over=over)
    scores = md.softmax(logits, count) if score == "softmax" else md.sigmoid(logits)
    weight, expert = _choose(scores, count, choices, bias, groups, chosen_groups, group_score)
    if normalise:
        weight = _normalised(weight, "choice")
    chance = scores if score == "softmax" else _normalised(scores, count)
    used = md.mean(md.cast(md.one_hot(expert, count), chance.dtype), expert.shape)
    losses = RouterLosses(
        balance=count.size * md.sum(used * md.mean(chance, chance.shape.without([count.name]))),
        z=md.mean(md.square(md.logsumexp(logits, count))),
        tokens=None if bias is None else _tokens(expert, count),
    )
    return Routing(expert, weight if scale == 1 else weight * scale, losses, count.size)


def route_misfits(
    count: Dimension, choices: int, groups: int, chosen_groups: int, group_score: str
) -> list[str]:
    """Returns the problems with the numbers of experts, choices and groups."""
    problems = []
    if not 1 <= choices <= count.size:
        problems.append(f"choices={choices} of {count} experts; needs 1 to {count.size}")
    if groups < 1 or count.size % groups:
        return [*problems, f"{count} experts do not divide into groups={groups}"]
    if not 1 <= chosen_groups <= groups:
        problems.append(f"chosen_groups={chosen_groups} of groups={groups}; needs 1 to {groups}")
    elif choices > chosen_groups * (count.size // groups):
        problems.append(
            f"choices={choices} of chosen_groups={chosen_groups} with {count.size // groups} "
            "experts each: too many"
        )
    if group_score not in ("max", "top2"):
        problems.append(f"group_score={group_score!r}: choose from max, top2")
    if group_score == "top2" and count.size // groups < 2:
        problems.append(f"group_score='top2' needs two experts in each of groups={groups}")
    return problems


def _choose(
    scores: md.Tensor,
    count: Dimension,
    choices: int,
    bias: md.Tensor | None,
    groups: int,
    chosen_groups: int,
    group_score: str,
) -> tuple[md.Tensor, md.Tensor]:
    """Returns the scores of the chosen experts, and their numbers: [..., choice]."""
    if bias is None and chosen_groups == groups:
        return md.top_k(scores, choices, count, "choice")
    biased = scores
    if bias is not None:
        biased = scores + md.stop_gradient(md.cast(bias, scores.dtype))
    if chosen_groups < groups:
        parts = md.dims(group_of_experts=groups, expert_of_group=count.size // groups)
        grouped = md.split(biased, count, parts)
        best, _ = md.top_k(grouped, 1 if group_score == "max" else 2, parts[1], "choice")
        _, group = md.top_k(md.sum(best, "choice"), chosen_groups, parts[0], "choice")
        open_groups = md.any(md.one_hot(group, parts[0], "bool"), "choice")
        biased = md.merge(md.where(open_groups, grouped, -math.inf), parts, count)
    _, expert = md.top_k(biased, choices, count, "choice")
    # Not as a product of matrices: a TPU would round the float32 scores to bfloat16.
    chosen = md.one_hot(expert, count, "bool")
    return md.sum(md.where(chosen, scores, 0), count), expert


def _normalised(scores: md.Tensor, over: DimLike) -> md.Tensor:
    """Returns scores over their sum; zeros where all are zeros, as those of sigmoid may be."""
    return scores / (md.sum(scores, over) + _LEAST)


def _tokens(expert: md.Tensor, count: Dimension) -> md.Tensor:
    return md.sum(md.one_hot(expert, count, "int32"), expert.shape)


@operation
def balance_bias(
    bias: md.Tensor,
    routing: Routing | md.Tensor,
    rate: float = 0.001,
    over: DimLike | None = None,
) -> md.Tensor:
    """Returns a router's bias after a step: lower for experts with more than their share of tokens.

    `nn.balance_bias(bias, routing)` adds `rate` for experts with fewer tokens than the mean, and
    subtracts it for those with more (Wang et al. 2024, "Auxiliary-loss-free load balancing",
    algorithm 1). It is no gradient step: `update=` of `meshdsl.training.train` calls it after the
    optimizer.

        def update(params, added):  # the loss returns (loss, {"tokens": routing.losses.tokens})
            return replace(params, bias=nn.balance_bias(params.bias, added["tokens"]))

    Args:
        bias: [routed], or of several routers, [layers, routed].
        routing: of the tokens of the step; or how many tokens chose each expert, with as many dims
            as the bias, in any number type, such as the mean over microbatches.
        rate: of the change.
        over: the dim of the experts. None: the only one of the bias.

    Raises:
        ValueError: the bias has several dims, and `over` does not say which.

    Examples:
        >>> bias = md.zeros(md.dims(routed=3))
        >>> tokens = md.named([6, 2, 4], ["routed"])  # how many chose each expert
        >>> print(md.nn.balance_bias(bias, tokens, rate=0.5))
        f32[routed=3] [-0.5  0.5  0. ]
    """
    if over is None and len(bias.shape) != 1:
        raise ValueError(f"a bias {bias.shape} has several dims: over= says which counts experts")
    count = bias.shape.get(bias.shape.names[0] if over is None else over)
    tokens = _tokens(routing.expert, count) if isinstance(routing, Routing) else routing
    tokens = md.cast(tokens, "float32")  # the products of int32 would overflow in large batches
    missing = md.sum(tokens, count) - tokens * count.size
    return bias + rate * md.cast(md.sign(missing), bias.dtype)
