"""A mixture of experts, against a loop over tokens in numpy, and what it moves."""

from collections import Counter

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn
from meshdsl.lowering.costs.flops import instruction_flops
from tests.ops.agreement import message

BATCH, LENGTH, EMBED, D_FF, EXPERTS = 4, 6, 8, 12, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LENGTH, EMBED))
ROUTER = RNG.normal(size=(EMBED, EXPERTS))
W_IN = RNG.normal(size=(EXPERTS, EMBED, D_FF))
W_OUT = RNG.normal(size=(EXPERTS, D_FF, EMBED))
PARALLEL = {"mesh": "data:2,expert:2", "layout": "batch:data+expert?; experts:expert"}
WAYS = ("einsum", "gather", "sort")


class Experts(md.Module):
    w_in: md.Tensor  # experts, embed, d_ff
    w_out: md.Tensor  # experts, d_ff, embed

    def __call__(self, x):
        return nn.mlp(x, self.w_in, self.w_out, activation=md.relu)


def layer(x, router, w_in, w_out, slots=None, dispatch="einsum", choices=2, peers=1):
    routing = nn.route(x, router, choices)
    y = nn.moe(x, routing, Experts(w_in, w_out), slots, dispatch=dispatch, peers=peers)
    return y, routing.losses


def arguments():
    dims = (
        ["batch", "length", "embed"],
        ["embed", "routed"],
        ["experts", "embed", "d_ff"],
        ["experts", "d_ff", "embed"],
    )
    arrays = (X, ROUTER, W_IN, W_OUT)
    return [md.named(array, names) for array, names in zip(arrays, dims, strict=True)]


def expected(slots=LENGTH, choices=2):
    """Returns the layer's result, token by token: all first choices are seated first."""
    y = np.zeros_like(X)
    for row in range(BATCH):
        logits = X[row] @ ROUTER
        chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        ranked = np.argsort(-chance, axis=1)
        seated = Counter()
        for choice in range(choices):
            for token in range(LENGTH):
                expert = ranked[token, choice]
                if seated[expert] < slots:
                    seated[expert] += 1
                    best = chance[token, ranked[token, :choices]]
                    made = np.maximum(X[row, token] @ W_IN[expert], 0) @ W_OUT[expert]
                    y[row, token] += chance[token, expert] / best.sum() * made
    return y


@pytest.mark.long
@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize(
    "way",
    [*({"dispatch": way} for way in WAYS), *({"dispatch": "sort", "peers": n} for n in (2, 4))],
)
def test_without_a_limit_each_token_reaches_all_its_experts(way, choices):
    found = md.jit(lambda *a: layer(*a, **way, choices=choices)[0])(*arguments())
    np.testing.assert_allclose(found, expected(choices=choices), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_with_a_limit_those_late_in_the_queue_pass_the_expert_by(dispatch):
    found = md.jit(lambda *a: layer(*a, 2, dispatch)[0])(*arguments())
    assert not np.allclose(expected(2), expected())
    np.testing.assert_allclose(found, expected(2), rtol=1e-9, atol=1e-9)


def test_sorting_computes_a_product_for_each_choice_and_no_more():
    program = md.jit(lambda *a: layer(*a, dispatch="sort")[0]).lower(*arguments())
    products = [i for i in program.block.instructions if i.op == "grouped_einsum"]
    assert len(products) == 2
    assert {instruction_flops(i) for i in products} == {2 * BATCH * LENGTH * 2 * EMBED * D_FF}


def test_experts_may_have_parameters_that_they_share():
    x, router, _, _ = arguments()
    square = md.named(W_IN[:, :, :EMBED], ["experts", "embed", "out"])
    shared = md.named(np.arange(8.0), ["out"])

    class Square(md.Module):
        w: md.Tensor  # experts, embed, out
        scale: md.Tensor  # out

        def __call__(self, x):
            return (md.einsum(x, self.w, over="embed") * self.scale).rename(out="embed")

    def both(x, router, w, scale):
        routing = nn.route(x, router, 2)
        return [nn.moe(x, routing, Square(w, scale), dispatch=way) for way in WAYS]

    first, *others = md.jit(both)(x, router, square, shared)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-9, atol=1e-9)


def expected_of_peers(peers, slots):
    """Returns the layer's result: a peer takes so many choices of a sequence, first ones first."""
    y = np.zeros_like(X)
    for row in range(BATCH):
        logits = X[row] @ ROUTER
        chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        ranked = np.argsort(-chance, axis=1)[:, :2]
        queues = Counter()
        for choice in range(2):
            for token in range(LENGTH):
                expert = ranked[token, choice]
                peer = expert // (EXPERTS // peers)
                queues[peer] += 1
                if queues[peer] <= slots:
                    made = np.maximum(X[row, token] @ W_IN[expert], 0) @ W_OUT[expert]
                    weight = chance[token, expert] / chance[token, ranked[token]].sum()
                    y[row, token] += weight * made
    return y


@pytest.mark.parametrize(("peers", "slots"), [(2, 5), (2, 9), (4, 2), (2, 12)])
def test_those_late_in_the_queue_of_a_peer_pass_it_by(peers, slots):
    found = md.jit(lambda *a: layer(*a, slots, "sort", peers=peers)[0])(*arguments())
    np.testing.assert_allclose(found, expected_of_peers(peers, slots), rtol=1e-9, atol=1e-9)
    dropped = not np.allclose(found, expected())
    assert dropped == (slots < 9 if peers == 2 else True)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
@pytest.mark.parametrize("layout", [PARALLEL["layout"], "batch:data; d_ff:expert"])
@pytest.mark.parametrize("slots", [None, 5])
def test_peers_have_the_same_gradients_on_every_layout_and_backend(slots, layout, backend):
    gradient = md.grad(weighted_sum("sort", slots, peers=2), (0, 1, 2, 3))
    plain = md.jit(gradient, backend="numpy")(*arguments())
    where = PARALLEL | {"layout": layout, "backend": backend}
    for one, other in zip(md.jit(gradient, **where)(*arguments()), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [(None, None), ("x:2,y:2", "batch:x+y"), ("x:3,y:2", "batch:x; length:y")],
)
@pytest.mark.parametrize(("peers", "slots"), [(None, 1), (None, 2), (None, 6), (2, 5), (4, 2)])
def test_dropped_choices_are_counted(peers, slots, mesh, layout):
    def share(x, router):
        return nn.dropped_choices(nn.route(x, router, 2), slots, peers=peers)

    ranked = np.argsort(-(X @ ROUTER), axis=-1)[..., :2]
    queue_of = ranked if peers is None else ranked // (EXPERTS // peers)
    full = [Counter(row.ravel().tolist()) for row in queue_of]
    dropped = sum(max(count - slots, 0) for queues in full for count in queues.values())
    ours = md.jit(share, mesh, layout)(*arguments()[:2])
    np.testing.assert_allclose(ours, dropped / ranked.size, rtol=1e-6)
    assert (dropped > 0) == (slots < 6)


def test_more_slots_than_choices_take_no_memory():
    """No peer has more than every token's choices, of as many experts as it has."""

    def peak(slots):
        f = md.jit(lambda *a: layer(*a, slots, "sort", peers=4)[0])
        return f.lower(*arguments()).peak_bytes

    assert peak(100) == peak(LENGTH) > peak(LENGTH - 1)


def weighted_sum(dispatch, slots, **options):
    def total(*args):
        y, losses = layer(*args, slots, dispatch, **options)
        return md.sum(md.sin(y)) + losses.balance + losses.z

    return total


@pytest.mark.long
@pytest.mark.parametrize("slots", [None, 2])
@pytest.mark.parametrize("dispatch", WAYS)
def test_every_way_has_the_same_gradients_on_every_layout(dispatch, slots):
    if dispatch == "sort":
        slots = None
    of_all = tuple(range(4))
    plain = md.jit(md.grad(weighted_sum("einsum", slots), of_all))(*arguments())
    split = md.jit(md.grad(weighted_sum(dispatch, slots), of_all), **PARALLEL)(*arguments())
    for one, other in zip(plain, split, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_gradients_are_those_of_finite_differences():
    total = weighted_sum("gather", 2)
    value, gradients = md.jit(md.value_and_grad(total, tuple(range(4))))(*arguments())
    for number, gradient in enumerate(map(np.asarray, gradients)):
        step = RNG.normal(size=gradient.shape) * 1e-6
        moved = arguments()
        moved[number] = md.named(np.asarray(moved[number]) + step, moved[number].dims)
        change = float(md.jit(total)(*moved)) - float(value)
        np.testing.assert_allclose(change, (step * gradient).sum(), rtol=1e-3, atol=1e-10)


def kinds(function, **where):
    program = md.jit(function, backend="numpy", **where).lower(*arguments())
    return Counter(c.kind for c in program.collectives if c.axes == ("expert",))


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
@pytest.mark.parametrize("mesh", ["data:2,expert:2", "data:1,expert:4", "expert:2,data:2"])
def test_experts_on_an_axis_of_their_own_move_tokens_twice_there_and_twice_back(mesh, dispatch):
    where = PARALLEL | {"mesh": mesh}
    assert kinds(lambda *a: layer(*a, 3, dispatch)[0], **where) == {"all_to_all": 2}
    program = md.jit(
        md.grad(weighted_sum(dispatch, 3), (0, 1, 2, 3)), backend="numpy", **where
    ).lower(*arguments())
    moved = [c for c in program.collectives if c.kind == "all_to_all"]
    assert len(moved) == 4
    # What the slots of one device hold, forward and backward alike.
    devices = int(np.prod(list(program.mesh.sizes.values())))
    assert {c.payload_bytes for c in moved} == {BATCH * EXPERTS * 3 * EMBED * 8 // devices}
    others = [c for c in program.collectives if c.kind != "all_to_all"]
    assert {c.kind for c in others} <= {"all_reduce"}  # of gradients and of losses
    assert max(c.payload_bytes for c in others) <= 8 * EMBED * D_FF * EXPERTS


def test_tokens_are_gathered_for_their_peers_or_sent_to_them():
    def of_tokens(slots):
        program = md.jit(
            lambda *a: layer(*a, slots, "sort", peers=2)[0], backend="numpy", **PARALLEL
        ).lower(*arguments())
        large = [c for c in program.collectives if c.payload_bytes >= LENGTH * EMBED * 8]
        return [(c.kind, c.axes) for c in large]

    assert of_tokens(None) == [("all_gather", ("expert",)), ("reduce_scatter", ("expert",))]
    assert of_tokens(7) == [("all_to_all", ("expert",))] * 2


def test_losses_of_the_router():
    _, losses = md.jit(layer)(*arguments())
    logits = X @ ROUTER
    chance = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    used = np.zeros_like(chance)
    np.put_along_axis(used, np.argsort(-chance, -1)[..., :2], 0.5, -1)
    balance = EXPERTS * (used.mean((0, 1)) * chance.mean((0, 1))).sum()
    np.testing.assert_allclose(losses.balance, balance, rtol=1e-12)
    np.testing.assert_allclose(losses.z, (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-12)


def test_mistakes_are_told():
    x, router, w_in, w_out = arguments()
    assert "choices=5 of routed=4 experts; needs 1 to 4" in message(
        lambda x, router: nn.route(x, router, 5).weight, x, router
    )
    assert "slots=0: needs at least 1; None drops nothing" in message(
        lambda *a: layer(*a, slots=0)[0], x, router, w_in, w_out
    )
    assert "4 experts do not divide among peers=3" in message(
        lambda x, router: nn.dropped_choices(nn.route(x, router, 2), 2, peers=3), x, router
    )
    assert "dispatch='mail': choose from einsum, gather, sort" in message(
        lambda *a: layer(*a, dispatch="mail")[0], x, router, w_in, w_out
    )
    assert "dispatch='sort' with peers=1 drops nothing; leave slots=3 out" in message(
        lambda *a: layer(*a, slots=3, dispatch="sort")[0], x, router, w_in, w_out
    )
    assert "4 experts do not divide among peers=3" in message(
        lambda *a: layer(*a, dispatch="sort", peers=3)[0], x, router, w_in, w_out
    )
    assert "peers=2 needs dispatch='sort', not 'gather'" in message(
        lambda *a: layer(*a, dispatch="gather", peers=2)[0], x, router, w_in, w_out
    )
    assert "give a md.Module that holds them" in message(
        lambda x, router: nn.moe(x, nn.route(x, router, 2), lambda x: x, dispatch="sort"), x, router
    )
