"""To split over an axis of size 1 is the identity: of random programs, and of a model's step."""

import re
from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.layout import Layout, Rule
from meshdsl.lowering.lower import lower, tensors_of
from tests.golden.plans import Plan
from tests.property.programs import make_case

CASES = range(12)


def figures(graph, mesh, layout, options=None):
    """Returns a lowered program as text, what it sends, its time, memory and work."""
    program = lower(graph, mesh, layout, options)
    assert program.layout == layout  # as the user wrote it
    text = re.sub(r"^(program .*|layout .*)$", "", str(program), flags=re.M)
    sent = [(c.kind, c.axes, c.payload_bytes, c.wire_bytes, c.count) for c in program.collectives]
    return text, sent, program.seconds("v5p"), program.peak_bytes, program.flops


def with_axes(mesh, count, rng):
    """Returns a mesh with more axes, of size 1, somewhere among its own, and their names."""
    axes, names = list(mesh.axes), [f"one{n}" for n in range(count)]
    for name in names:
        axes.insert(rng.integers(len(axes) + 1), (name, 1))
    slow = {name for name in names if rng.random() < 0.2}
    return replace(mesh, axes=tuple(axes), slow=mesh.slow | slow), names


def with_rules(graph, layout, names, rng):
    """Returns a layout that splits over the axes too, in its own rules and in rules of others."""
    rules = list(layout.rules)
    left = list(names)
    for number, rule in enumerate(rules):
        if rule.axes and len(left) > 3 and rng.random() < 0.7:
            axes = list(rule.axes)
            axes.insert(rng.integers(len(axes) + 1), left.pop())
            rules[number] = replace(rule, axes=tuple(axes))
    given = {rule.dim for rule in rules}
    dims = {name for tensor, _ in tensors_of(graph) for name in tensor.shape.names}
    for dim in sorted(dims - given):
        if left:
            scope = str(rng.choice(["", "", "**/p", "params"]))
            rules.append(Rule(scope, dim, (left.pop(),), bool(rng.random() < 0.5)))
    return Layout(tuple(rules))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", CASES)
def test_axes_of_size_one_change_nothing(number):
    case = make_case(number)
    rng = np.random.default_rng(number)
    mesh, names = with_axes(case.mesh, 8, rng)
    layout = with_rules(case.graph, case.layout, names, rng)
    assert any(axis in names for rule in layout.rules for axis in rule.axes)
    options = case.options[0]
    expected = figures(case.graph, case.mesh, case.layout, options)
    assert figures(case.graph, mesh, case.layout, options) == expected
    assert figures(case.graph, mesh, layout, options) == expected


def test_a_step_takes_the_same_time_with_rules_over_an_axis_of_size_one():
    def step(layout):
        return Plan("gpt_mini", "data:4,model:1", layout, "layers=2,embed=64,vocab=256", 8)

    given = "batch:data; params/embed:data"
    over = f"{given}; heads:model; d_ff:model; vocab:model; length:model?"
    (expected, specs), (split, _) = step(given).jitted(), step(over).jitted()
    found = [jitted.lower(*specs) for jitted in (expected, split)]
    assert found[1].layout == Layout.parse(over)
    texts = [re.sub(r"^layout .*$", "", str(program), flags=re.M) for program in found]
    assert texts[0] == texts[1]
    seconds = [program.seconds("v5p") for program in found]
    assert seconds[0] == seconds[1]
    assert found[0].peak_bytes == found[1].peak_bytes


def test_arrays_and_placements_leave_axes_of_size_one_out():
    x = md.ones(md.dims(batch=4, embed=2))
    mesh, over = "data:2,one:1,two:1", "batch:one+data; embed:two"
    assert str(md.place(x, mesh, over).layout) == "batch:data"
    double = md.jit(lambda x: x * 2.0, mesh, over)
    assert str(double(x).layout) == "batch:data"
    np.testing.assert_array_equal(double(md.place(x, mesh, over)), np.full([4, 2], 2.0))
    stages = double.stages(md.spec(x.dims))
    given = stages.placement
    every = [*given.inputs.values(), *given.outputs.values(), *given.tensors.values()]
    assert {str(layout) for layout in every} == {"batch:data"}
    given = md.Placement(inputs={"x": "batch:one+data"}, tensors={"x": "embed:two; batch:data"})
    placed = md.jit(double.function, mesh, over, placement=given)
    assert str(placed.lower(md.spec(x.dims))) == str(stages.program)
    np.testing.assert_array_equal(placed(x), np.full([4, 2], 2.0))


def test_two_dims_may_not_claim_an_axis_whatever_its_size():
    with pytest.raises(ValueError, match="`heads:model` and `embed:model` both claim mesh axis"):
        md.jit(lambda x: x + 1.0, "model:1", "heads:model; embed:model").lower(
            md.spec(md.dims(heads=2, embed=2))
        )
