"""The cases of Zheng et al. 2022, "Alpa", section 8.2, on four devices: the known answers."""

from collections import Counter

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.models import load
from meshdsl.search.searching import search
from tests.search.steps import mlp, step_of

LAYERS = 6


def counts(plan):
    """Returns how often a plan sends tensors, by kind; sums of a few numbers are left out."""
    rows = [c for c in plan.program.collectives if c.payload_bytes > 64]
    return Counter(c.kind for c in rows for _ in range(c.count))


def test_an_mlp_with_a_large_batch_is_data_parallel_with_one_all_reduce():
    best = search(mlp(65536, 256, LAYERS), "h100", 4).best
    assert str(best.point.layout) == "batch:data"
    assert str(best.program.mesh) == "data:4"
    assert counts(best) == {"all_reduce": 1}


def test_an_mlp_with_large_weights_alternates_columns_and_rows():
    plans = search(mlp(16, 8192, LAYERS), "h100", 4)
    alternating = [p for p in plans.plans if str(p.point.layout) in ("a:model", "b:b_parts")]
    assert plans.best in alternating
    # If the first layer is split by columns, no gradient of the input is added up.
    assert {str(p.point.layout): counts(p) for p in alternating} == {
        "a:model": {"all_reduce": LAYERS},
        "b:b_parts": {"all_reduce": LAYERS - 1},
    }


@pytest.mark.long
def test_on_two_axes_an_mlp_is_split_both_ways():
    best = search(mlp(4096, 4096, LAYERS), "h100", Mesh.parse("x:2,y:2")).best
    axes = {rule.dim: rule.axes for rule in best.point.layout.rules if not rule.scope}
    assert axes["batch"] in (("x",), ("y",))
    weights = axes.get("a") or axes["b"]
    assert {*axes["batch"], *weights} == {"x", "y"}


def test_wide_layers_of_bert_are_split_by_heads_and_d_ff_on_one_axis():
    model = load("bert_mini").with_overrides("layers=2,embed=4096,heads=32,d_ff=16384")
    best = search(step_of(model.init, model.loss, model.batch_spec(4, 128)), "v5p", 4).best
    axes = {rule.dim: rule.axes for rule in best.point.layout.rules}
    assert axes["heads"] == axes["d_ff"] == ("model",)
    assert str(best.program.mesh) == "model:4"
