"""What staying partial forces on others is counted, beside the reductions that it saves."""

import random as pseudo

import pytest

import meshdsl as md
from meshdsl import nn
from meshdsl.lowering.placement import planning
from meshdsl.lowering.placement.partial_sums import _AxisProblem, place_reductions
from meshdsl.lowering.placement.reads import Reads
from tests.lowering.plans import collectives, lowered
from tests.ops.agreement import random

AXIS, DEVICES = "model", 8
MESH = f"{AXIS}:{DEVICES}"


def times(x, w):
    """Returns x times w, whose columns are split: x is gathered."""
    return md.einsum(x.rename(channels="other"), w, over="other")


def residual(x, a, s, b):
    h = times(x, a)
    return times(h, s) + times(md.silu(md.tanh(h)), b)


def loss(*args):
    return md.sum(md.square(residual(*args)))


@pytest.mark.parametrize(("rows", "size"), [(16_384, 4_096), (512, 4_096), (4_096, 512)])
@pytest.mark.parametrize(("wrt", "units"), [((1, 2, 3), 5), (0, 6), ((0, 1, 2, 3), 6)])
def test_the_branch_of_a_residual_is_reduced_rather_than_its_factors_gathered(
    rows, size, wrt, units
):
    batch, channels, other = md.dims(rows=rows, channels=size, other=size)
    weights = [md.spec([other, channels], "float32")] * 3
    step = md.jit(md.grad(loss, wrt), MESH, "channels:model")
    program = step.lower(md.spec([batch, channels], "float32"), *weights)
    unit = rows * size * 4 * (DEVICES - 1) / DEVICES  # to gather or to scatter one activation
    assert program.wire_bytes == units * unit


@pytest.mark.parametrize(("groups", "units"), [(32, 5), (8, 5), (4, 7)])
def test_a_group_norm_in_the_branch_adds_moves_only_where_its_groups_straddle(groups, units):
    rows, size = 4_096, 1_024
    batch, channels, other = md.dims(rows=rows, channels=size, other=size)

    def branch(x, a, s, b):
        h = times(x, a)
        normal = nn.group_norm(md.tanh(h), [], "channels", groups)
        return times(h, s) + times(md.silu(normal), b)

    step = md.jit(
        md.grad(lambda *args: md.sum(md.square(branch(*args))), (1, 2, 3)), MESH, "channels:model"
    )
    weights = [md.spec([other, channels], "float32")] * 3
    program = step.lower(md.spec([batch, channels], "float32"), *weights)
    assert program.wire_bytes <= units * rows * size * 4 * (DEVICES - 1) / DEVICES


def test_the_gradients_of_a_residual_are_those_of_one_device():
    batch, channels, other = md.dims(rows=4, channels=16, other=16)
    x, *weights = random([batch, channels]), *(random([other, channels]) for _ in range(3))
    lowered(md.grad(loss, (0, 1, 2, 3)), x, *weights, layout="channels:model", mesh="model:4")


def test_a_factor_that_another_reader_gathers_anyway_lets_a_product_stay_partial():
    rows, channels, other = md.dims(rows=8, channels=16, other=16)

    def model(x, w, v, z):
        one = md.einsum(x, w, over="channels").rename(other="channels") * z
        two = md.einsum(md.tanh(x), v, over="channels").rename(other="channels")
        return one + two, z.rename(channels="unsplit") * 2

    x, z = random([rows, channels]), random([rows, channels])
    w, v = random([channels, other]), random([channels, other])
    assert collectives(model, x, w, v, z, layout="channels:model") == [
        "all_gather model [rows=8, channels=16]",
        "reduce_scatter model [rows=8, channels=16]",
    ]


# Against every choice of what stays partial.


def program_of(seed):
    """Returns a random function of products, sums and what is not linear, and its arguments."""
    rng = pseudo.Random(seed)
    rows, channels = rng.choice([64, 512]), 512
    batch, channel, other = md.dims(rows=rows, channels=channels, other=channels)
    steps = [
        (rng.random(), rng.choice([0, 1]), [(rng.choice("+*ts"), rng.random()) for _ in range(2)])
        for _ in range(2)
    ]

    def function(x, *weights):
        values = [x]
        for (which, transposed, work), w in zip(steps, weights, strict=True):
            one = values[int(which * len(values))]
            if transposed:
                y = times(one, w.rename(channels="other", other="channels"))
            else:
                y = md.einsum(one, w, over="channels").rename(other="channels")
            for kind, where in work:
                given = values[int(where * len(values))]
                y = {"+": y + given, "*": y * md.tanh(given), "t": md.tanh(y), "s": y * 2.0}[kind]
            values.append(y)
        return sum(values[1:-1], values[-1])

    if rng.random() < 0.5:
        forward, wrt = function, rng.choice([0, 1])
        function = md.grad(lambda *args: md.sum(md.square(forward(*args))), wrt)
    return function, [
        md.spec([batch, channel], "float32"),
        *[md.spec([channel, other], "float32")] * len(steps),
    ]


def legal(problem, planned, kept):
    """Whether each tensor that stays partial has partial operands to be made of."""
    partial = kept | problem.made
    for op, strategy in planned.strategies.items():
        if op.outputs[0] in kept:
            operands = [t for t in problem._partial_operands(op, strategy) if t in partial]
            twice = sum(any(op.inputs[i] is t for t in operands) for i in strategy.linear) > 1
            if not operands or (twice and not strategy.additive):
                return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16))
def test_no_other_choice_of_what_stays_partial_sends_less(seed, monkeypatch):
    function, args = program_of(seed)
    sent = []

    def forced(choice):
        def place(planned):
            problem = _AxisProblem(planned, AXIS, Reads(planned))
            problem._reach(planned.graph)
            passing = [t for op in planned.strategies for t in op.outputs if t in problem.passing]
            if choice is None:
                sent.append(2 ** min(len(passing), 8))
                return place_reductions(planned)
            kept = {t for i, t in enumerate(passing) if choice >> i & 1}
            if not legal(problem, planned, kept):
                return place_reductions(planned)
            return dict.fromkeys(kept, frozenset([AXIS]))

        monkeypatch.setattr(planning, "place_reductions", place)
        return md.jit(function, MESH, "channels:model").lower(*args).wire_bytes

    best = forced(None)
    starts = 8 * 1024  # some bytes more are sent to start fewer collectives
    assert best <= min(forced(choice) for choice in range(sent[0])) + starts
