"""Products that share operands or sums choose their strategies together."""

import itertools
import random as pseudo
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.prices import LinkPrices
from meshdsl.lowering import lower
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.lowering.lower import lower as lowered_by
from meshdsl.lowering.lower import lower_in_stages
from meshdsl.lowering.options import Options
from meshdsl.lowering.passes.verify import verify
from meshdsl.lowering.placement import joint
from meshdsl.lowering.placement.joint import better_of
from meshdsl.reports.stages import show_stage
from tests.lowering.plans import lowered
from tests.ops.agreement import random

DEVICES = 8
MESH = f"model:{DEVICES}"
RULES = "channels:model; hidden:model?"
WEIGHTS = (("channels", "hidden"), ("hidden", "channels"), ("hidden", "channels"))


def residual(x, a, s, b, groups=0):
    h = md.einsum(x, a, over="channels")
    inner = md.tanh(h)
    if groups:
        inner = nn.group_norm(inner, [], "hidden", groups)
    return md.einsum(h, s, over="hidden") + md.einsum(md.silu(inner), b, over="hidden")


def step(wrt=(1, 2, 3), layers=1, groups=0):
    """Returns the gradient of some residual branches in a row."""

    def loss(x, *weights):
        for i in range(layers):
            x = residual(x, *weights[3 * i : 3 * i + 3], groups=groups)
        return md.sum(md.square(x))

    return md.grad(loss, wrt)


def specs(rows, size, layers=1):
    sizes = {dim.name: dim for dim in md.dims(rows=rows, channels=size, hidden=size)}
    weights = [md.spec([sizes[name] for name in names], "float32") for names in WEIGHTS]
    return [md.spec([sizes["rows"], sizes["channels"]], "float32"), *weights * layers]


def sent(function, args, layout=RULES, mesh=MESH):
    return md.jit(function, mesh, layout).lower(*args).wire_bytes


def alone(monkeypatch, *args):
    """Returns the bytes if every product chooses by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(lower, "choose_jointly", lambda placed: placed)
        return sent(*args)


def units(rows, size, devices=DEVICES):
    """Returns the bytes to gather an activation, and to move a weight from one dim to another."""
    return rows * size * 4 * (devices - 1) / devices, size * size * 4 * (devices - 1) / devices**2


@pytest.mark.parametrize(("rows", "size"), [(16_384, 4_096), (4_096, 512), (256, 64)])
@pytest.mark.parametrize(("wrt", "gathers", "moves"), [((1, 2, 3), 3, 6), ((0, 1, 2, 3), 4, 4)])
def test_the_products_of_a_residual_branch_share_their_moves(
    rows, size, wrt, gathers, moves, monkeypatch
):
    activation, weight = units(rows, size)
    function, args = step(wrt), specs(rows, size)
    assert sent(function, args) <= gathers * activation + moves * weight
    assert alone(monkeypatch, function, args) == 6 * activation


@pytest.mark.parametrize(("groups", "gathers"), [(32, 3), (8, 3), (4, 5)])
def test_a_group_norm_in_the_branch_does_not_hinder_them(groups, gathers):
    activation, weight = units(4_096, 1_024)
    found = sent(step(groups=groups), specs(4_096, 1_024))
    assert found <= gathers * activation + 6 * weight


@pytest.mark.parametrize(
    ("mesh", "layout", "share"),
    [
        ("data:2,model:4", RULES + "; rows:data", 0.63),
        ("data@dcn:2,model:4", RULES + "; rows:data", 0.66),
        ("data:2,model:4", RULES + "; rows:data; params/hidden:data", 0.9),
        ("data:2,model:4", "channels:data+model; hidden:model+data?", 0.55),
    ],
)
def test_they_do_on_two_axes(mesh, layout, share, monkeypatch):
    def named(x, params):
        return step()(x, *params)

    x, *weights = specs(16_384, 4_096)
    args = named, (x, weights), layout, mesh
    assert sent(*args) <= share * alone(monkeypatch, *args)


@pytest.mark.parametrize(
    "layout", ["channels:model", "hidden:model", "channels:model?; hidden:model"]
)
def test_one_rule_sends_what_it_sent(layout, monkeypatch):
    args = step(), specs(16_384, 4_096), layout
    assert sent(*args) == alone(monkeypatch, *args)


def numpy_gradients(x, a, s, b):
    """Returns the gradients of the sum of squares of a residual branch, by hand."""
    h = x @ a
    inner = np.tanh(h)
    gate = 1 / (1 + np.exp(-inner))
    branch = inner * gate
    dy = 2 * (h @ s + branch @ b)
    slope = gate * (1 + inner * (1 - gate)) * (1 - inner**2)
    dh = dy @ s.T + (dy @ b.T) * slope
    return dh @ a.T, x.T @ dh, h.T @ dy, branch.T @ dy


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("model:4", RULES),
        ("data:2,model:4", RULES + "; rows:data"),
        ("data:2,model:4", "channels:data+model; hidden:model+data?"),
    ],
)
def test_the_gradients_are_those_of_numpy(mesh, layout):
    rows, channels, hidden = md.dims(rows=512, channels=16, hidden=16)
    shapes = [[rows, channels], [channels, hidden], [hidden, channels], [hidden, channels]]
    args = [random(shape) for shape in shapes]
    function = step((0, 1, 2, 3))
    program = lowered(function, *args, layout=layout, mesh=mesh)
    assert "all_to_all" in [one.kind for one in program.collectives]  # weights are moved
    found = jax.tree.leaves(md.jit(function, mesh, layout, "numpy")(*args))
    expected = numpy_gradients(*(np.asarray(each, "float64") for each in args))
    for mine, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(mine), want, rtol=1e-9, atol=1e-9)


def test_layers_in_a_row_share_too_and_the_search_stays_small(monkeypatch):
    written = []
    usual = joint._Group._cost

    def count(group, numbers):
        written.append(len(group.graph.operations))
        return usual(group, numbers)

    monkeypatch.setattr(joint._Group, "_cost", count)
    for layers in (1, 4, 12):
        written.clear()
        args = step(range(1, 3 * layers + 1), layers), specs(16_384, 4_096, layers)
        together = sent(*args)
        assert sum(written) <= joint._WRITTEN + joint._TRIED * max(written)
        assert together <= 0.72 * alone(monkeypatch, *args)


def scanned(x, weights):
    def body(x, w):
        return md.tanh(residual(x, *w)) + x, None

    return md.sum(md.square(md.scan(body, x, weights, dim="layers")[0]))


def test_layers_of_a_loop_share_in_both_passes(monkeypatch):
    (layers,) = md.dims(layers=4)
    x, *weights = specs(16_384, 4_096)
    stacked = [md.spec([layers, *w.dims], "float32") for w in weights]
    args = md.grad(scanned, 1), (x, stacked)
    assert sent(*args) <= 0.69 * alone(monkeypatch, *args)


def test_the_gradients_of_a_loop_are_those_of_one_device():
    layers, rows, channels, hidden = md.dims(layers=3, rows=512, channels=16, hidden=16)
    shapes = [[channels, hidden], [hidden, channels], [hidden, channels]]
    weights = [random([layers, *shape]) * 0.1 for shape in shapes]
    x = random([rows, channels])
    program = lowered(md.grad(scanned, (0, 1)), x, weights, layout=RULES, mesh="model:4")
    assert "all_to_all" in [one.kind for one in program.collectives]


def test_a_placement_of_joint_strategies_is_lowered_to_the_same_program():
    rows, channels, hidden = md.dims(rows=4_096, channels=512, hidden=512)
    shapes = [[rows, channels], [channels, hidden], [hidden, channels], [hidden, channels]]
    function = md.jit(step(), MESH, RULES)
    graph = function.trace(*(md.spec(shape, "float32") for shape in shapes))
    mesh, layout = md.Mesh.parse(MESH), md.Layout.parse(RULES)
    stages = lower_in_stages(graph, mesh, layout)
    again = lower_in_stages(graph, mesh, layout, placement=stages.placement)
    assert str(again.program) == str(stages.program)


# Against other choices.


def program_of(seed):
    """Returns a random function of products that share operands and sums, and its arguments."""
    rng = pseudo.Random(seed)
    dims = {dim.name: dim for dim in md.dims(channels=512, hidden=512)}
    other = {"channels": "hidden", "hidden": "channels"}
    kinds, steps = ["channels"], []
    for _ in range(rng.choice([2, 3, 4])):
        which = rng.randrange(len(kinds))
        over = other[kinds[which]] if rng.random() < 0.3 else kinds[which]
        result = other[over]
        alike = [i for i, kind in enumerate(kinds) if kind == result]
        work = [(rng.choice("+*ts"), rng.choice(alike) if alike else None) for _ in range(2)]
        steps.append((which, over, work))
        kinds.append(result)

    def function(x, *weights):
        values = [x]
        for (which, over, work), w in zip(steps, weights, strict=True):
            one = values[which]
            if one.shape.find(over) is None:
                one = one.rename({other[over]: over})
            y = md.einsum(one, w, over=over)
            for kind, which in work:
                given = y if which is None else values[which]
                y = {"+": y + given, "*": y * md.tanh(given), "t": md.tanh(y), "s": y * 2.0}[kind]
            values.append(y)
        return sum(md.sum(md.square(value)) for value in values[1:])

    (rows,) = md.dims(rows=rng.choice([64, 512, 4_096]))
    weights = [md.spec([dims[over], dims[other[over]]], "float32") for _, over, _ in steps]
    wrt = rng.choice([0, (1, 2), tuple(range(len(weights) + 1))])
    layout = rng.choice([RULES, RULES, "channels:model?; hidden:model"])
    return md.grad(function, wrt), [md.spec([rows, dims["channels"]], "float32"), *weights], layout


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_never_send_more_than_if_each_product_chooses(seed, monkeypatch):
    args = program_of(seed)
    assert sent(*args) <= alone(monkeypatch, *args)


def test_no_other_strategies_of_a_residual_branch_send_less(monkeypatch):
    groups = []
    solve = joint._Group.solve

    def watch(group):
        groups.append((group, solve(group)))
        return groups[-1][1]

    monkeypatch.setattr(joint._Group, "solve", watch)
    sent(step(), specs(16_384, 4_096))
    ((group, strategies),) = groups
    found = [
        product.strategies.index(strategies[op]) if op in strategies else product.usual
        for op, product in group.products.items()
    ]
    ranges = [range(len(product.strategies)) for product in group.products.values()]
    costs = {
        choice: group._cost(dict(zip(group.products, choice, strict=True)))
        for choice in itertools.product(*ranges)
    }
    assert len(costs) == 2**8
    assert costs[tuple(found)] == min(costs.values())


# Which lowering is taken.


def program(wire_bytes, peak_bytes):
    block = SimpleNamespace(wire_bytes=wire_bytes, peak_bytes=peak_bytes, collectives=())
    block.mesh = SimpleNamespace(slow=frozenset())
    return SimpleNamespace(program=block)


@pytest.mark.parametrize(
    ("joint_one", "taken"),
    [((90, 10), "joint"), ((110, 10), "usual"), ((90, 30), "joint"), ((100, 10), "usual")],
)
def test_joint_strategies_are_taken_if_the_program_sends_less(joint_one, taken):
    programs = {"usual": program(100, 10), "joint": program(*joint_one)}
    assert better_of(programs.get, "usual", "joint") is programs[taken]


def test_with_prices_those_that_take_less_time_are_taken_though_they_send_more():
    prices = LinkPrices.on(hardware("h100"), Mesh.parse("slice@dcn:2,data:4"))
    programs = {"usual": program(100, 10), "joint": program(110, 10)}
    for name, axis in (("usual", "slice"), ("joint", "data")):
        lowered = programs[name].program
        sent = SimpleNamespace(
            kind="all_gather", axes=(axis,), wire_bytes=lowered.wire_bytes * 2**20, count=1
        )
        lowered.collectives = (sent,)
    assert better_of(programs.get, "usual", "joint") is programs["usual"]
    assert better_of(programs.get, "usual", "joint", prices) is programs["joint"]


# Random programs whose joint strategies send less and hold more: their number, the mesh, the
# layout, and the bytes of a device, which the other strategies fit into.
DEARER = [
    (356, "data:2,model:4", "rows:data+model?; hidden:data+model", 4_456_448),
    (396, "data@dcn:2,model:4", "channels:data+model; hidden:model+data?", 3_145_728),
]


@pytest.mark.parametrize(("seed", "mesh", "layout", "room"), DEARER)
def test_products_choose_one_by_one_where_that_fits_and_together_does_not(seed, mesh, layout, room):
    function, args, _ = program_of(seed)
    graph, where = md.jit(function).trace(*args), (Mesh.parse(mesh), Layout.parse(layout))
    known = replace(hardware("v5p"), memory_bytes=room)
    usual = lowered_by(graph, *where)
    assert usual.peak_bytes > room
    for one in (
        lowered_by(graph, *where, hardware=known),
        lowered_by(graph, *where, Options(memory=room)),
    ):
        assert one.peak_bytes <= room and one.wire_bytes > usual.wire_bytes
        verify(one)


def test_products_choose_one_by_one_where_that_is_faster():
    function, args, _ = program_of(159)
    graph = md.jit(function).trace(*args)
    layout = Layout.parse("rows:model?; channels:data+model?; hidden:data?; params/channels:data")
    fast = lowered_by(graph, Mesh.parse("data:2,model:4"), layout, hardware=hardware("v5p"))
    (one,) = [one for one in fast.decisions if one.name == "products"]
    assert (one.chosen.name, one.other.name) == ("one by one", "together")
    assert one.chosen.seconds < one.other.seconds


@pytest.mark.parametrize(
    ("seed", "layout"),
    [
        (18, RULES),
        (25, "rows:model?; channels:data+model?; hidden:data?"),
        (28, "channels:data+model?; hidden:model+data?"),
        (132, "rows:model?; channels:data+model?; hidden:data?"),
    ],
)
def test_on_known_hardware_no_step_is_slower_than_if_each_product_chooses(
    seed, layout, monkeypatch
):
    """Each was, when the strategies that send less were taken, or changed in turn with others."""
    function, args, _ = program_of(seed)
    graph = md.jit(function).trace(*args)
    v5p = hardware("v5p")

    def seconds():
        where = Mesh.parse("data:2,model:4"), Layout.parse(layout)
        return simulate(lowered_by(graph, *where, hardware=v5p), v5p).seconds

    together = seconds()
    monkeypatch.setattr(lower, "choose_jointly", lambda placed: placed)
    assert together <= 1.001 * seconds()


def test_of_products_that_gain_by_time_too_the_decision_is_told():
    args = specs(16_384, 4_096)
    fast = md.jit(step(), MESH, RULES, options=Options(hardware="v5p")).lower(*args)
    (one,) = [one for one in fast.decisions if one.name == "products"]
    assert one.chosen.name == "together" and one.chosen.seconds < one.other.seconds


@pytest.mark.parametrize(("fits", "other"), [("usual", "joint"), ("joint", "usual")])
def test_a_placement_that_fits_one_of_them_decides(fits, other):
    def write(which):
        if which == other:
            raise ValueError("the placement does not fit the program")
        return program(100, 10)

    assert better_of(write, "usual", "joint").program.wire_bytes == 100


def test_the_planned_stage_marks_the_strategies_that_were_taken():
    function, args = step(), specs(4_096, 512)
    stages = md.jit(function, MESH, RULES).stages(*args)
    shown = show_stage(stages, "planned")
    taken = [line for line in shown.splitlines() if line.startswith("  * hidden:model , hidden")]
    # The two products whose results add up.
    assert sum("replicated (partial sum over model)" in line for line in taken) == 2, shown
