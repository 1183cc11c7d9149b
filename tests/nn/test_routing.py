"""Routers, against numpy in float64, written from the papers token by token."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models, nn
from tests.ops.agreement import message

BATCH, LENGTH, EMBED, EXPERTS = 3, 5, 8, 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LENGTH, EMBED))
ROUTER = RNG.normal(size=(EMBED, EXPERTS))
BIAS = RNG.normal(size=EXPERTS) * 0.3
MESHES = {"mesh": "data:2,model:2", "backend": "numpy"}


def arguments():
    return (
        md.named(X, ["batch", "length", "embed"]),
        md.named(ROUTER, ["embed", "routed"]),
        md.named(BIAS, ["routed"]),
    )


def deepseek_v2(token, choices, groups, chosen_groups, scale):
    """DeepSeek-AI 2024, "DeepSeek-V2", equations 20 to 22 and section 2.2.2."""
    logits = token @ ROUTER
    affinity = np.exp(logits) / np.exp(logits).sum()
    size = EXPERTS // groups
    highest = [affinity[g * size : (g + 1) * size].max() for g in range(groups)]
    devices = sorted(range(groups), key=lambda g: -highest[g])[:chosen_groups]
    candidates = [e for e in range(EXPERTS) if e // size in devices]
    chosen = sorted(candidates, key=lambda e: -affinity[e])[:choices]
    return chosen, [affinity[e] * scale for e in chosen]


def deepseek_v3(token, choices, groups, chosen_groups, scale):
    """DeepSeek-AI 2024, "DeepSeek-V3", equations 13 to 16 and section 2.1.2."""
    affinity = 1 / (1 + np.exp(-(token @ ROUTER)))
    biased = affinity + BIAS
    size = EXPERTS // groups
    best_two = [np.sort(biased[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
    nodes = sorted(range(groups), key=lambda g: -best_two[g])[:chosen_groups]
    candidates = [e for e in range(EXPERTS) if e // size in nodes]
    chosen = sorted(candidates, key=lambda e: -biased[e])[:choices]
    total = sum(affinity[e] for e in chosen)
    return chosen, [affinity[e] / total * scale for e in chosen]


PAPERS = {
    "v2": (deepseek_v2, {"normalise": False}),
    "v3": (deepseek_v3, {"score": "sigmoid", "group_score": "top2"}),
}


@pytest.mark.parametrize(
    "where",
    [
        {},
        MESHES | {"layout": "batch:data; embed:model"},
        MESHES | {"layout": "length:data; routed:model"},
    ],
)
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("paper", PAPERS)
def test_experts_and_weights_are_those_of_the_paper(paper, groups, where):
    expected, options = PAPERS[paper]
    options = options | {"groups": groups[0], "chosen_groups": groups[1], "scale": 2.5}

    def model(x, router, bias):
        if paper == "v2":
            bias = None
        routing = nn.route(x, router, 3, bias=bias, **options)
        return routing.expert, routing.weight

    expert, weight = map(np.asarray, md.jit(model, **where)(*arguments()))
    for place in np.ndindex(BATCH, LENGTH):
        chosen, weights = expected(X[place], 3, *groups, 2.5)
        assert list(expert[place]) == chosen
        np.testing.assert_allclose(weight[place], weights, rtol=1e-12)


def test_no_weight_is_a_product_of_matrices():
    # On a TPU, such a product has its float32 operands rounded to bfloat16.
    def products(options):
        function = md.jit(lambda x, r, b: nn.route(x, r, 3, **options(b)).weight)
        return str(function.lower(*arguments())).count("einsum")

    assert products(lambda b: {}) == products(lambda b: {"bias": b}) == 1
    assert products(lambda b: {"groups": 4, "chosen_groups": 2}) == 1


def test_weights_have_gradients_and_the_bias_has_none():
    def total(x, router, bias):
        routing = nn.route(x, router, 3, score="sigmoid", bias=bias, groups=4, chosen_groups=2)
        return md.sum(md.sin(3.0 * routing.weight)) + routing.losses.balance

    value, gradients = md.jit(md.value_and_grad(total, (0, 1, 2)))(*arguments())
    assert not np.asarray(gradients[2]).any()
    for number in (0, 1):
        gradient = np.asarray(gradients[number])
        step = RNG.normal(size=gradient.shape) * 1e-6
        moved = list(arguments())
        moved[number] = md.named(np.asarray(moved[number]) + step, moved[number].dims)
        change = float(md.jit(total)(*moved)) - float(value)
        np.testing.assert_allclose(change, (step * gradient).sum(), rtol=1e-3, atol=1e-10)


def test_scores_that_are_all_zero_have_weights_and_gradients_of_zero():
    x = md.named(np.ones((1, 1), np.float32), ["length", "embed"])
    router = md.named(np.float32([[-200, -300, -400, -500]]), ["embed", "routed"])

    def total(x, router):
        routing = nn.route(x, router, 2, score="sigmoid")
        return 1e9 * md.sum(routing.weight) + routing.losses.balance

    value, gradients = md.jit(md.value_and_grad(total, (0, 1)))(x, router)
    assert float(value) == 0
    assert not any(np.asarray(gradient).any() for gradient in gradients)


def test_the_bias_falls_for_experts_with_more_than_their_share():
    def model(x, router, bias):
        routing = nn.route(x, router, 3, bias=bias)
        return nn.balance_bias(bias, routing, 0.01), routing.expert

    after, expert = md.jit(model)(*arguments())
    tokens = np.bincount(np.asarray(expert).ravel(), minlength=EXPERTS)
    expected = BIAS + 0.01 * np.sign(tokens.mean() - tokens)
    np.testing.assert_allclose(after, expected, rtol=1e-12)


def test_counts_whose_products_leave_int32_balance_the_bias_too():
    tokens = np.full(256, 5, np.int32)
    tokens[0] = 12_000_000
    bias = md.named(np.zeros(256, np.float32), ["routed"])
    after = np.asarray(nn.balance_bias(bias, md.named(tokens, ["routed"]), 1.0))
    np.testing.assert_array_equal(after, np.sign(tokens.mean() - tokens))
    equal = md.named(np.full(256, 12_000_000, np.int32), ["routed"])
    assert not np.asarray(nn.balance_bias(bias, equal)).any()


def test_balancing_the_bias_balances_the_experts():
    @md.jit
    def step(x, router, bias):
        routing = nn.route(x, router, 3, score="sigmoid", bias=bias)
        return nn.balance_bias(bias, routing, 0.02), routing.expert

    x, router, bias = arguments()
    bias = md.named(np.zeros(EXPERTS), bias.dims)
    unequal = []
    for _ in range(60):
        bias, expert = step(x, router, bias)
        unequal.append(np.bincount(np.asarray(expert).ravel(), minlength=EXPERTS).std())
    assert np.mean(unequal[-10:]) < 0.5 * unequal[0]


def test_all_misfits_are_told():
    x, router, _ = arguments()
    text = message(
        lambda x, r: (
            nn.route(x, r, 7, score="tanh", groups=4, chosen_groups=2, group_score="mean").weight
        ),
        x,
        router,
    )
    assert "choices=7 of chosen_groups=2 with 3 experts each: too many" in text
    assert "group_score='mean': choose from max, top2" in text
    assert "score='tanh': choose from softmax, sigmoid" in text
    assert "routed=12 experts do not divide into groups=5" in message(
        lambda x, r: nn.route(x, r, 2, groups=5).weight, x, router
    )


def test_deepseek_mini_routes_as_deepseek_v2_after_a_dense_layer():
    model = models.load("deepseek_mini", "policy=float64")
    config = model.config
    params = md.jit(model.init, backend="numpy")(md.random.key(0))
    assert params.dense_blocks.mlp.w_in.shape.get("d_ff").size == config.d_ff * (2 + 2)
    assert [str(d) for d in params.blocks.mlp.router.dims] == ["layers=1", "embed=128", "routed=8"]
    assert dict(config.router_options) == {
        "score": "softmax", "normalise": False, "scale": 1.0,
        "groups": 4, "chosen_groups": 2, "group_score": "max",
    }  # fmt: skip


@pytest.mark.long
def test_fields_of_the_configuration_reach_the_router():
    text = (
        "experts=4,layers=2,dense_layers=1,dense_d_ff=24,router_score=sigmoid,router_scale=2.5,"
        "router_groups=2,router_group_score=top2"
    )
    model = models.load("mixtral_mini", f"{text},embed=16,heads=2,kv_heads=1,d_ff=8,vocab=32")
    batch = {
        name: md.named(RNG.integers(0, 32, (2, 4)).astype("int32"), ["batch", "length"])
        for name in ("tokens", "targets")
    }
    params = md.jit(model.init)(md.random.key(0))
    assert params.dense_blocks.mlp.w_in.shape.get("d_ff").size == 24
    loss, gradients = md.jit(md.value_and_grad(model.loss), backend="numpy")(params, batch)
    assert np.isfinite(float(loss))
    assert np.asarray(gradients.blocks.mlp.router).any()


@pytest.mark.parametrize("name", ["t5_mini", "bert_mini"])
def test_models_with_other_stacks_refuse_dense_layers(name):
    with pytest.raises(ValueError, match="dense_layers=1 are for decoder-only models"):
        models.load(name, "experts=4,dense_layers=1")
