"""A placement prints, reads back, and is lowered to the program that it was taken from."""

import random
from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.layouts.placement import Placement, parse_layout
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.lower import lower, lower_in_stages
from meshdsl.lowering.options import Options
from meshdsl.lowering.placement.identity import names_of
from meshdsl.reports.stages import STAGES, show_stage
from tests.golden.plans import PLANS
from tests.ops import agreement
from tests.property.programs import make_case
from tests.property.test_random_programs import compare

batch, wide, narrow = md.dims(batch=8, wide=16, narrow=4)
MESH = "data:2,model:4"
NO_PIPELINE = Options(pipeline="none")


def mlp(x, w, v):
    h = md.tanh(md.einsum(x, w, over="narrow"))
    return md.einsum(h, v, over="wide")


def arguments():
    return agreement.random([batch, narrow]), *(agreement.random([narrow, wide]) for _ in range(2))


def stages(layout, placement=None, mesh=MESH):
    return md.jit(mlp, mesh, layout, "numpy", placement=placement).stages(*arguments())


def test_tensors_are_called_by_their_paths_or_by_who_makes_them():
    placement = stages("batch:data; wide:model").placement
    assert {name: str(at) for name, at in placement.tensors.items()} == {
        "x": "batch:data",
        "w": "wide:model",
        "v": "wide:model",
        "mlp/h.einsum": "batch:data; wide:model",
        "mlp/h.tanh": "batch:data; wide:model",
        "mlp/mlp.einsum": "batch:data",
    }
    assert {name: str(at) for name, at in placement.inputs.items()} == {
        "x": "batch:data",
        "w": "wide:model",
        "v": "wide:model",
    }


def test_names_are_unique_in_a_program_with_bodies():
    for name in ("gpt_mini_fsdp", "gpt_mini_microbatches", "mixtral_mini_experts"):
        graph = stages_of(PLANS[name]).simplified.graph
        names = names_of(graph)
        assert len({*names.values()}) == len(names)


def stages_of(plan):
    """Returns the stages of a golden plan's training step."""
    jitted, specs = plan.jitted()
    return jitted.stages(*specs)


@pytest.mark.parametrize("name", ["gpt_mini_zero1", "gpt_mini_fsdp", "gpt_mini_ring"])
def test_a_training_step_is_the_same_from_its_placement(name):
    one = stages_of(PLANS[name])
    simplified, options = one.simplified, PLANS[name].options
    read = Placement.parse(str(one.placement))
    assert read == one.placement
    again = lower(simplified.graph, simplified.mesh, simplified.layout, options, placement=read)
    assert str(again) == str(replace(one.program, donated=()))


@pytest.mark.parametrize("number", range(40))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_programs_are_the_same_from_their_placements(number):
    case = make_case(number)
    jitted = md.jit(case.function, case.mesh, case.layout, "numpy", options=NO_PIPELINE)
    one = jitted.stages(case.inputs)
    read = Placement.parse(str(one.placement))
    assert read == one.placement
    again = md.jit(
        case.function, case.mesh, case.layout, "numpy", options=NO_PIPELINE, placement=read
    )
    assert str(again.lower(case.inputs)) == str(jitted.lower(case.inputs))


@pytest.mark.long
@pytest.mark.parametrize("number", range(40))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_placement_gives_the_same_numbers(number):
    case = make_case(number)
    expected = md.jit(case.function, backend="numpy")(case.inputs)
    jitted = md.jit(case.function, case.mesh, case.layout, "numpy", options=NO_PIPELINE)
    one = jitted.stages(case.inputs)
    rng = random.Random(number)
    axes = [axis for axis, size in one.simplified.mesh.axes if size > 1]
    tensors = {name: t for t, name in names_of(one.simplified.graph).items()}
    inside = sorted(one.placement.tensors)
    some = rng.sample(inside, min(len(inside), 6)) if number % 4 else inside
    chosen = {name: _anywhere(rng, tensors[name].shape, axes) for name in some}
    placement = Placement(tensors=chosen)
    placed = md.jit(
        case.function, case.mesh, case.layout, "numpy", options=NO_PIPELINE, placement=placement
    )
    compare(placed(case.inputs), expected, f"case {number} with {chosen}")


def _anywhere(rng, shape, axes):
    """Returns a random layout of a shape: each axis splits some dim, or none."""
    splits = {}
    for axis in axes:
        dims = [d.name for d in shape if d.size > 1]
        if dims and rng.random() < 0.7:
            splits.setdefault(rng.choice(dims), []).append(axis)
    return TensorLayout.of(splits)


def test_one_tensor_can_be_placed_by_hand():
    usual = stages("batch:data; wide:model")
    here = Placement.parse("mlp/h.tanh  batch:data+model")
    other = stages("batch:data; wide:model", here)
    assert str(other.placement.tensors["mlp/h.tanh"]) == "batch:data+model"
    assert usual.placement.tensors["mlp/h.einsum"] == other.placement.tensors["mlp/h.einsum"]
    given = arguments()
    placed = md.jit(mlp, MESH, "batch:data; wide:model", "numpy", placement=here)
    np.testing.assert_allclose(np.asarray(placed(*given)), np.asarray(mlp(*given)), rtol=1e-12)


def test_inputs_and_outputs_arrive_where_a_placement_says():
    here = Placement.parse("in x  narrow:model\nout result  batch:model")
    found = stages("batch:data", here)
    block = found.program.block
    assert str(block.inputs[0].layout) == "narrow:model"
    assert str(block.outputs[0].layout) == "batch:model"


def test_a_tensor_may_stay_partial_by_hand():
    def total(x, w):
        y = md.einsum(x, w, over="narrow")
        return md.sum(y * 2.0)

    x, w, _ = arguments()
    jitted = md.jit(total, "model:4", "narrow:model", "numpy")
    placement = jitted.stages(x, w).placement
    assert [name.split("/")[1] for name in placement.partial] == ["total.multiply", "total.sum"]
    at_once = Placement(tensors={name: placement.tensors[name] for name in placement.partial})
    early = md.jit(total, "model:4", "narrow:model", "numpy", placement=at_once)
    (reduced,) = early.lower(x, w).collectives
    assert str(reduced.dims) == "[batch=8, wide=16]"
    (reduced,) = jitted.lower(x, w).collectives
    assert str(reduced.dims) == "[]"


def test_all_that_does_not_fit_a_program_is_reported_at_once():
    wrong = Placement.parse(
        """
        in  y             batch:data
        mlp/h.einsumm     batch:data      # a slip
        mlp/h.einsum      btach:data
        mlp/h.tanh     batch:date
        out  results      batch:data
        """
    )
    with pytest.raises(ValueError) as error:
        stages("batch:data; wide:model", wrong)
    text = str(error.value)
    assert text.startswith("the placement does not fit the program; f.stages(...).placement has")
    assert "there is no tensor `mlp/h.einsumm`. Did you mean `mlp/h.einsum`" in text
    assert "has no dim `btach`. Did you mean `batch`?" in text
    assert "no axis `date` in mesh `data:2 model:4`. Did you mean `data`?" in text
    assert "there is no input `y`" in text
    assert "there is no output `results`" in text
    assert len(text.splitlines()) == 6


def test_a_tensor_that_is_no_sum_cannot_stay_partial():
    with pytest.raises(
        ValueError, match=r"`mlp/h.tanh` .* cannot stay partial over `model`: it is no partial sum"
    ):
        stages("batch:data", Placement.parse("mlp/h.tanh  replicated (partial over model)"))


def test_a_malformed_placement_is_reported_line_by_line():
    with pytest.raises(ValueError) as error:
        Placement.parse("x batch:data\nx wide:model\ny\nz batch:data+\nw a:m; b:m")
    assert str(error.value).splitlines() == [
        "malformed placement",
        "  line 2: `x` has a layout already",
        "  line 3: `y` is not of the form `tensor  dim:axis`, perhaps with `(partial over axis)`",
        "  line 4: `batch:data+` is not a layout such as `batch:data; d_ff:slice+model` or "
        "`replicated`",
        "  line 5: `a:m; b:m` has axis `m` twice",
    ]


@pytest.mark.parametrize(
    "layout",
    [
        TensorLayout(),
        TensorLayout.of({"a": ["x", "y"], "b": ["z"]}),
    ],
)
def test_a_layout_reads_back_as_it_prints(layout):
    assert parse_layout(str(layout)) is layout


def test_xla_takes_no_placement_and_has_no_stages():
    with pytest.raises(ValueError, match="takes no placement: XLA decides"):
        md.jit(mlp, MESH, "", "jax_auto", placement=Placement())
    with pytest.raises(ValueError, match="has no stages of lowering: XLA decides"):
        md.jit(mlp, MESH, "", "jax_auto").stages(*arguments())


@pytest.mark.parametrize(("name", "layout"), [("cpu", "inner:model"), (None, "replicated")])
def test_hardware_decides_whether_to_send_less_or_to_compute_less(name, layout):
    """Gathering x sends 19 KiB; summing what each device has of the product, 24 KiB."""
    rows, columns, inner = md.dims(rows=64, columns=64, inner=100)
    x, w = md.spec([rows, inner]), md.spec([inner, columns])
    graph = md.jit(lambda x, w: md.einsum(x, w, over="inner")).trace(x, w)
    at_rest = TensorLayout.of({"inner": ["model"]})
    here = Placement(inputs={"x": at_rest}, tensors={"x": at_rest, "w": TensorLayout()})
    one = lower_in_stages(
        graph,
        md.Mesh.of("model:4"),
        md.Layout(),
        hardware=hardware(name) if name else None,
        placement=here,
    )
    (strategy,) = one.planned.strategies.values()
    assert str(strategy.operands[0]) == layout
    assert layout in show_stage(one, "planned")


def test_stages_are_frozen_and_each_is_entered_once(monkeypatch):
    from meshdsl.lowering import lower as lowering

    entered = []
    for name in ("place", "plan", "reduce", "_write"):
        stage = getattr(lowering, name)
        monkeypatch.setattr(
            lowering, name, lambda *a, _n=name, _s=stage, **k: entered.append(_n) or _s(*a, **k)
        )
    one = stages("batch:data; wide:model")
    assert entered == ["place", "plan", "reduce", "_write"]
    for stage in (one, one.simplified, one.placed, one.planned, one.reduced, one.written):
        with pytest.raises(AttributeError):
            stage.graph = None


def test_every_stage_has_a_text():
    one = stages("batch:data; wide:model")
    texts = {name: show_stage(one, name) for name in STAGES}
    assert "mlp/h.einsum" in texts["placed"] and "batch:data; wide:model" in texts["placed"]
    assert "* batch:data , wide:model -> batch:data; wide:model" in texts["planned"]
    assert "mlp/mlp.einsum  is made partial over model" in texts["reduced"]
    assert "einsum" in texts["simplified"] and "all_reduce" in texts["written"]
    assert texts["passes"] == str(one.program)
    with pytest.raises(ValueError, match="no stage 'plan'; stages are simplified, placed"):
        show_stage(one, "plan")


def test_the_condition_of_a_while_loop_reads_the_carries_where_the_body_has_them():
    side, edge = md.dims(side=8, edge=8)

    def grown(x):
        def goes_on(state):
            y, n = state
            return (n < 9) & (md.max(md.sum(y, over="edge")) < 20.0)

        start = x, md.full([], 0, "int32")
        return md.while_loop(goes_on, lambda s: (s[0] * 1.5 + 0.1, s[1] + 1), start)[0]

    x = agreement.random([side, edge])
    placement = md.jit(grown, "data:2", "side:data", "numpy").stages(x).placement
    (carry,) = [name for name in placement.tensors if name.endswith("/body/in0")]
    assert not [name for name in placement.tensors if name.endswith("/condition/in0")]
    moved = md.jit(grown, "data:2", "side:data", "numpy", placement=f"{carry}  edge:data")
    np.testing.assert_allclose(np.asarray(moved(x)), np.asarray(md.jit(grown)(x)), rtol=1e-6)


def test_names_may_have_spaces():
    def doubled(x):
        return md.name(x["a b"] * 2, "my value") + 1

    jitted = md.jit(doubled, "data:2", "batch:data", "numpy")
    given = {"a b": agreement.random([batch])}
    placement = jitted.stages(given).placement
    assert "my value" in placement.tensors and "x/a b" in placement.inputs
    assert Placement.parse(str(placement)) == placement


def test_text_is_a_placement_too_and_other_things_are_refused():
    assert Placement.of("x  batch:-").tensors == {"x": TensorLayout()}
    assert Placement(tensors={"x": "batch:data"}) == Placement.parse("x  batch:data")
    with pytest.raises(ValueError, match=r"a placement is given as md\.Placement"):
        md.jit(mlp, MESH, "", placement={"x": "batch:data"})
    with pytest.raises(ValueError, match="which is no layout such as"):
        Placement(tensors={"x": ["batch"]})


def test_what_is_made_where_it_is_read_has_no_place():
    def shifted(x):
        return x + md.cast(md.arange(batch), x.dtype)

    jitted = md.jit(shifted, "data:2", "batch:data", "numpy")
    names = names_of(jitted.stages(agreement.random([batch])).simplified.graph).values()
    (places,) = [name for name in names if name.endswith(".arange")]
    pinned = md.jit(shifted, "data:2", "", "numpy", placement=f"{places}  batch:data")
    with pytest.raises(ValueError, match="is a constant, which every reader computes for itself"):
        pinned.lower(agreement.random([batch]))


def test_a_name_that_statements_assign_to_is_explained():
    with pytest.raises(ValueError, match=r"no tensor `h`; `h` is assigned from `mlp/h\.einsum`"):
        stages("batch:data", "h  batch:data")
    with pytest.raises(ValueError, match="there is no mesh: give a mesh"):
        stages("", "mlp/h.tanh  batch:data", mesh=None)
