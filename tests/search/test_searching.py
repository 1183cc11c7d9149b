"""Searches find what trying everything finds, and say how far off they may be."""

import itertools
import warnings
from types import SimpleNamespace

import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.lower import lower
from meshdsl.models import load
from meshdsl.optim import Sgd
from meshdsl.search.estimates import is_plain
from meshdsl.search.plans import DoesNotFit, Effort, Plans
from meshdsl.search.searching import Search, _worth_keeping, search
from meshdsl.search.space import Variant
from meshdsl.search.steps import recipe_step
from meshdsl.training import Recipe
from tests.search.programs import make_case
from tests.search.steps import gpt, mlp, step_of


def seconds_of_all(step, hardware, devices):
    """Returns the simulated time of every point of the space that fits."""
    found = Search(step, hardware, devices)
    every = {}
    for row in found.candidates()[0]:
        point = row.point
        graph = step.graph(point.variant)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                program = lower(graph, point.mesh, point.layout, found.exact, step.donated(graph))
            except ValueError:
                continue
        if program.peak_bytes <= found.room:
            every[str(point.mesh), str(point.layout)] = step_seconds(program, found.hardware)
    return every


@pytest.mark.parametrize(
    ("step", "hardware"),
    [
        (mlp(4096, 256, 3), "v5p"),
        (mlp(16, 2048, 3), "v5p"),
        (mlp(512, 1024, 2), "h100"),
        pytest.param(gpt(), "v5p", marks=pytest.mark.slow),
    ],
)
def test_the_best_of_all_is_found_and_the_certificate_holds(step, hardware):
    best = min(seconds_of_all(step, hardware, 4).values())
    plans = search(step, hardware, 4)
    assert plans.best.decided
    assert plans.best.seconds <= 1.02 * best
    assert plans.best.seconds <= (1 + plans.gap) * best * 1.001  # what the certificate says
    assert all(plan.bound <= 1.001 * plan.seconds for plan in plans.plans)


def test_a_search_is_deterministic():
    first, second = (search(mlp(512, 1024, 2), "h100", 8) for _ in range(2))
    assert [str(p.point.layout) for p in first.plans] == [str(p.point.layout) for p in second.plans]
    assert first.gap == second.gap


@pytest.mark.long
def test_rules_that_are_given_are_kept():
    step = gpt()
    mesh, rules = Mesh.parse("data:2,model:2"), Layout.parse("heads:model")
    plans = search(step, "v5p", mesh, rules, Effort(estimated=20, tried=3, decided=1))
    for plan in plans.plans:
        assert str(plan.point.layout).startswith("heads:model")
        assert str(plan.program.mesh) == "data:2 model:2"


def test_a_limit_on_memory_is_kept_and_an_impossible_one_is_explained():
    limit = max(plan.peak_bytes for plan in search(mlp(16, 2048, 3), "v5p", 4).plans) - 1
    step = mlp(16, 2048, 3, options=md.Options(memory=limit))
    assert all(plan.peak_bytes <= limit for plan in search(step, "v5p", 4).plans)
    step = mlp(16, 2048, 3, options=md.Options(memory=1000))
    with pytest.raises(ValueError, match=r"no layout fits: .* needs more than 1000 B"):
        search(step, "v5p", 4)


def test_more_effort_never_finds_less():
    step = mlp(512, 1024, 2, microbatches=(1, 2))
    few = search(step, "h100", 8, effort=Effort(tried=2, decided=1))
    many = search(step, "h100", 8, effort=Effort(tried=16, decided=8))
    assert many.best.seconds <= few.best.seconds
    assert many.gap <= few.gap


@pytest.mark.long
def test_a_plan_that_has_to_be_the_best_is_the_best_of_all():
    step = mlp(512, 1024, 2)
    said = []
    effort = Effort(tried=2, decided=1, within=0.0, on_progress=lambda *values: said.append(values))
    plans = search(step, "h100", 8, effort=effort)
    assert plans.best.seconds == min(seconds_of_all(step, "h100", 8).values())
    assert plans.gap == 0.0 and plans.complete
    shares, left = zip(*said, strict=True)
    assert list(shares) == sorted(shares, reverse=True) and shares[-1] > 0
    assert list(left) == sorted(left, reverse=True) and left[-1] >= 1
    few = search(step, "h100", 8, effort=Effort(tried=2, decided=1))
    assert few.lowered < plans.lowered <= few.lowered + len(said) <= plans.fitting + few.lowered
    points = [plan.point for plan in (*plans.plans, *plans.tight)]
    assert len(points) == len(set(points))
    assert few.gap > 0.01
    within = shares[len(said) // 2]  # it ends there
    near = search(step, "h100", 8, effort=Effort(tried=2, decided=1, within=within))
    assert 0 < near.gap <= within and near.lowered <= few.lowered + len(said) // 2


def test_nothing_is_proven_where_nothing_fits():
    limit = 0.8 * min(plan.peak_bytes for plan in search(mlp(16, 2048, 3), "v5p", 4).plans)
    step = mlp(16, 2048, 3, options=md.Options(memory=int(limit)))
    said = []
    plans = search(
        step, "v5p", 4, effort=Effort(within=0.0, on_progress=lambda *one: said.append(one))
    )
    assert plans.tight and not plans.plans and not said


def test_a_proof_that_time_ends_says_how_far_it_came():
    stops = []
    effort = Effort(
        tried=2,
        decided=1,
        within=0.0,
        stopped=lambda: bool(stops),
        on_progress=lambda *values: stops.append(values),
    )
    plans = search(mlp(512, 1024, 2), "h100", 8, effort=effort)
    assert stops and not plans.complete and plans.gap > 0


def test_of_a_proof_the_fastest_plans_and_the_smaller_ones_are_kept():
    def plan(seconds, peak):
        return SimpleNamespace(seconds=seconds, peak_bytes=peak)

    plans = [plan(1.0 + at, 100 + at) for at in range(12)]
    small, smaller = plan(20.0, 90), plan(21.0, 80)
    kept = _worth_keeping([smaller, *reversed(plans), small, plan(22.0, 85)])
    assert kept == [*plans[:8], small, smaller]


def with_remat(batch, microbatches):
    """Returns the step of a small transformer that may compute everything again."""
    model = load("gpt_mini").with_overrides("layers=2")

    def recipe(remat):
        made = model.with_overrides(f"remat={remat}")
        return Recipe(made.init, made.loss, Sgd(1e-3))

    spec = model.batch_spec(batch, 128)
    return recipe_step(recipe("none"), spec, microbatches, ("none", "full"), recipe)


@pytest.mark.long
def test_plans_of_less_memory_are_found_where_data_parallelism_fits():
    """Their bounds may be above its time. The search for the best plan stays the same."""
    step = with_remat(256, (1, 2, 4, 8))
    few, more = (search(step, "v5p", 4, effort=Effort(60, 4, 1, smaller)) for smaller in (0, 3))
    smaller = more.front[-3:]
    assert more.lowered == few.lowered + len(smaller)
    assert more.best.seconds == few.best.seconds and more.best.point == few.best.point
    assert smaller[-1].point.variant.remat == "full"
    least = min(plan.peak_bytes for plan in few.plans)
    for plan in smaller:
        assert plan.peak_bytes < 0.7 * least
        assert plan.bound < 2 * few.best.seconds
        least = plan.peak_bytes


def test_what_is_computed_again_gets_its_share_of_the_estimates():
    """Without, the fastest by bounds alone crowd out all that fit."""
    found = Search(with_remat(16, (1,)), "v5p", 4, effort=Effort(estimated=8))
    rows = sorted(found.candidates()[0], key=lambda row: (row.bound, row.order))
    assert {row.point.variant.remat for row in rows[:8]} == {"none"}
    first = [row.point.variant.remat for row in found._first(rows)]
    assert min(first.count("none"), first.count("full")) >= 4


def test_data_parallelism_is_always_decided_about():
    """What time decides may make it the fastest, though it is slower as it is lowered at first."""
    plans = search(gpt(), "v5p", 4, effort=Effort(tried=3, decided=1))
    plain = [p for p in plans.plans if all(r.kind == "data" for r in p.point.structure.roles)]
    assert any(plan.decided for plan in plain)


def test_what_is_tried_is_about_as_fast_as_what_time_decides_on():
    """Else a search overlooks FSDP, which is slow where NCCL joins the gathers of its weights."""
    found = Search(mlp(16384, 4096, 4), "h100", 8)
    rows = [row for row in found.candidates()[0] if is_plain(row.point)]
    (at,) = (at for at, row in enumerate(rows) if row.point.structure.storage == "params")
    found._lowered(rows, at)
    tried, point = found._tried[at], rows[at].point
    decided = found._decided(tried)
    joined = found.program(point.mesh, point.layout, point.variant, found.quick)
    assert tried.seconds <= 1.05 * decided.seconds
    assert step_seconds(joined, found.hardware) >= 1.1 * decided.seconds


def test_gradients_in_microbatches_are_tried_as_they_fit():
    """Else no plan of a large model has microbatches: complete gradients do not fit beside it."""
    found = Search(mlp(64, 2048, 4, microbatches=(4,)), "v5p", 4)
    rows = [row for row in found.candidates()[0] if is_plain(row.point)]
    (at,) = (at for at, row in enumerate(rows) if row.point.structure.storage == "params")
    found._lowered(rows, at)
    complete = found._tried[at]
    assert complete.fits and complete.memory is None
    found.room = 0.75 * complete.peak_bytes
    found._lowered(rows, at)
    tried = found._tried[at]
    assert tried.fits and tried.memory == int(found.room)
    decided = found._decided(tried)
    assert decided.fits and decided.decided
    assert 0.95 * decided.seconds <= tried.seconds <= 1.05 * decided.seconds


def test_what_is_near_the_fastest_is_tried_in_halves():
    """Else a search decides about other points than those that halves make the fastest."""
    model = load("gpt_mini").with_overrides("layers=2,embed=2048,heads=16,d_ff=8192")
    found = Search(step_of(model.init, model.loss, model.batch_spec(64, 512)), "v5p", 4)
    rows = [
        row
        for row in found.candidates()[0]
        if str(row.point.layout).startswith("d_ff:model; heads:model; vocab:model; length:model?")
    ]
    found._lowered(rows, 0)
    tried = found._tried[0]
    decided = found._decided(tried)
    halves = [one for one in decided.program.decisions if one.name == "halves"]
    assert any(one.chosen.name != "none" for one in halves)
    assert 0.97 * decided.seconds <= tried.seconds <= 1.03 * decided.seconds


def test_moves_of_least_time_are_tried_where_bytes_say_little():
    """Else a search prefers what sends little over what is fast, where nodes share a network."""
    found = Search(mlp(4096, 2048, 2), "h100", Mesh.parse("slice@dcn:2,data:4"))
    rows = [row for row in found.candidates()[0] if str(row.point.layout) == "batch:slice+data"]
    found._lowered(rows, 0)
    tried = found._tried[0]
    decided = found._decided(tried)
    moves = [one for one in decided.program.decisions if one.name == "moves"]
    assert [one.chosen.name for one in moves] == ["least time"]
    assert tried.seconds <= 1.02 * decided.seconds


LITTLE = Effort(estimated=12, tried=1, decided=1)


@pytest.mark.parametrize("layout", ["batch:x; a:y?", "params/a:x; batch:y", "params/a:x"])
def test_a_given_layout_may_have_axes_of_optional_and_scoped_rules_alone(layout):
    pinned = Layout.parse(layout)
    plans = Search(mlp(512, 64, 2), "v5p", 4, pinned, LITTLE, closed=True).run()
    assert plans.best.program.mesh.size == 4
    assert str(plans.best.point.layout) == layout


@pytest.mark.parametrize(
    "layout", ["batch:x+y", "batch:x+y; a:z", "a:z; batch:x+y", "a:x+y", "batch:x; a:y+z"]
)
def test_rules_may_give_several_axes_to_a_dim(layout):
    rules = Layout.parse(layout).rules
    best = search(mlp(512, 64, 2), "v5p", 16, Layout.parse(layout), LITTLE).best
    assert set(rules) <= set(best.point.layout.rules)
    axes = [axis for axis, _ in best.program.mesh.axes]
    for rule in rules:  # side by side, major first
        start = axes.index(rule.axes[0])
        assert tuple(axes[start : start + len(rule.axes)]) == rule.axes


@pytest.mark.parametrize("layout", ["rows:x+y; kv:z", "kv:z; rows:x+y"])
def test_rules_with_several_axes_may_stand_beside_a_dim_without_a_role(layout):
    case = next(case for case in map(make_case, itertools.count()) if "kv" in names_in(case))
    rows = Search(case.step, "v5p", 8, Layout.parse(layout)).candidates()[0]
    assert rows and all({"x", "y", "z"} <= set(row.point.structure.axes) for row in rows)


def names_in(case):
    graph = case.step.graph(Variant())
    return {name for op in graph.operations for t in op.outputs for name in t.shape.names}


def test_of_a_given_layout_one_axis_goes_across_the_slices():
    pinned = Layout.parse("batch:x; a:y")
    best = Search(mlp(512, 64, 2), "v5p", 8, pinned, LITTLE, slices=2, closed=True).run().best
    assert str(best.program.mesh) in ("x@dcn:2 y:4", "y@dcn:2 x:4")
    pinned = Layout.parse("batch:x")
    with pytest.raises(ValueError, match=r"batch:x does not fit 8 devices: .* across the 2 slices"):
        Search(mlp(512, 64, 2), "v5p", 8, pinned, LITTLE, slices=2, closed=True).run()


def test_the_axis_across_slices_has_no_other_rules():
    pinned = Layout.parse("a:slice")
    with pytest.raises(ValueError, match="names the axis across the slices `slice`, and splits"):
        search(mlp(512, 64, 2), "v5p", 8, pinned, LITTLE, slices=2)


def test_a_rule_that_keeps_the_batch_from_the_slices_is_refused():
    """Else all slices do the same work."""
    says = r"divides `batch` among the slices, and `batch:x` rules that out: .* `batch:slice\+x`"
    with pytest.raises(ValueError, match=says):
        search(mlp(512, 64, 2), "v5p", 8, Layout.parse("batch:x"), LITTLE, slices=2)


def test_a_single_device_has_each_plan_once():
    plans = search(mlp(512, 64, 2), "v5p", 1, Layout.parse("batch:x"), LITTLE)
    assert plans.points == 1 and len(plans.plans) == 1


def test_time_that_is_over_ends_the_enumeration_too():
    """With many axes it takes minutes. Points that were not enumerated have no bound."""
    stop = iter([False, True])
    effort = Effort(stopped=lambda: next(stop, True))
    mesh = Mesh.parse("x:2,y:2,z:2")
    plans = Search(mlp(512, 64, 2), "v5p", mesh, effort=effort).run()
    every = Search(mlp(512, 64, 2), "v5p", mesh).candidates()[1]
    assert plans.points < every / 2
    assert plans.plans and not plans.complete and plans.bound is None and plans.gap is None


def test_a_given_layout_is_not_proven_to_be_the_best():
    plans = Search(mlp(512, 64, 2), "v5p", 4, Layout.parse("batch:x"), LITTLE, closed=True).run()
    assert plans.bound is None and plans.gap is None


def test_a_search_that_was_stopped_does_not_say_that_nothing_fits():
    plan = search(mlp(512, 64, 2), "v5p", 4, effort=LITTLE).best
    for complete, says in ((True, "^no layout fits: of 9, "), (False, "^stopped early: no layout")):
        plans = Plans(hardware("v5p"), (), (plan,), None, 9, 9, 1, 1.0, 2.0, complete)
        with pytest.raises(DoesNotFit, match=says):
            assert plans.best


@pytest.mark.parametrize("closed", [True, False])
def test_rules_are_kept_on_a_single_device(closed):
    pinned = Layout.parse("batch:x; params/a:x")
    best = Search(mlp(512, 64, 2), "v5p", 1, pinned, LITTLE, closed=closed).run().best
    assert str(best.program.mesh) == "x:1" and str(best.point.layout) == "batch:x; params/a:x"


def test_a_mesh_of_one_device_needs_no_rules():
    best = search(mlp(512, 64, 2), "v5p", Mesh.parse("x:1"), effort=LITTLE).best
    assert str(best.program.mesh) == "x:1" and not best.point.layout.rules
