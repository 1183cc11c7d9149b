"""TensorLayout: a normal form for where one tensor is, and the steps between such forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.tensors.dims import Shape, dims

MESH = Mesh.parse("pod:2 data:4 model:3")
DIMS = ("batch", "length", "heads", "embed")


@st.composite
def layouts(draw):
    """Each axis splits a dim, is partial, or does neither."""
    splits, partial = {}, {}
    for axis in draw(st.permutations(MESH.names)):
        use = draw(st.sampled_from([*DIMS, "sum", "max", None]))
        if use in DIMS:
            splits.setdefault(use, []).append(axis)
        elif use is not None:
            partial[axis] = use
    return TensorLayout.of(splits, partial)


def test_layouts_are_equal_whatever_order_their_dims_are_given_in():
    one = TensorLayout.of({"batch": ["data"], "heads": ["model"]})
    assert one == TensorLayout.of({"heads": ("model",), "batch": ("data",)})
    assert hash(one) == hash(TensorLayout.of({"heads": ("model",), "batch": ("data",)}))


def test_the_order_of_the_axes_of_one_dim_matters():
    assert TensorLayout.of({"batch": ["pod", "data"]}) != TensorLayout.of(
        {"batch": ["data", "pod"]}
    )


def test_a_dim_without_axes_is_left_out():
    assert TensorLayout.of({"batch": ()}) == TensorLayout()


@pytest.mark.parametrize(
    ("splits", "partial"),
    [
        ({"batch": ["data"], "heads": ["data"]}, {}),
        ({"batch": ["data", "data"]}, {}),
        ({"batch": ["data"]}, {"data": "sum"}),
    ],
)
def test_an_axis_occurs_once(splits, partial):
    with pytest.raises(AssertionError, match="an axis occurs twice in batch:data"):
        TensorLayout.of(splits, partial)


def test_dims_and_axes_find_each_other():
    layout = TensorLayout.of({"batch": ["pod", "data"]}, {"model": "sum"})
    assert layout.axes("batch") == ("pod", "data")
    assert layout.axes("embed") == ()
    assert [layout.dim_of(axis) for axis in MESH.names] == ["batch", "batch", None]
    assert layout.split_axes == {"pod", "data"}
    assert layout.partial_axes == ("model",)


def test_splitting_replaces_the_axes_of_a_dim_and_keeps_the_rest():
    layout = TensorLayout.of({"batch": ["pod"], "heads": ["model"]})
    assert str(layout.split("batch", ["data"])) == "batch:data; heads:model"
    assert str(layout.split("batch", [])) == "heads:model"


def test_completing_a_layout_replicates_its_partial_axes():
    layout = TensorLayout.of({"batch": ["pod"]})
    assert layout.add_partial(["model", "data"]).complete() == layout
    assert layout.complete() is layout


def test_adding_a_partial_axis_keeps_the_kind_of_the_others():
    layout = TensorLayout.of({}, {"data": "max"}).add_partial(["model"])
    assert layout.partial == (("data", "max"), ("model", "sum"))


def test_a_split_axis_cannot_become_partial_as_well():
    with pytest.raises(AssertionError, match="an axis occurs twice in batch:data"):
        TensorLayout.of({"batch": ["data"]}).add_partial(["data"])


def test_restricting_to_dims_keeps_what_is_partial():
    layout = TensorLayout.of({"batch": ["pod"], "heads": ["data"]}, {"model": "sum"})
    assert str(layout.restrict(["heads"])) == "heads:data (partial sum over model)"


@given(layouts(), st.sets(st.sampled_from(MESH.names)))
def test_dropped_axes_are_replicated_and_no_other_changes(layout, axes):
    left = layout.drop(axes)
    assert left.split_axes == layout.split_axes - axes
    assert set(left.partial) == {(axis, kind) for axis, kind in layout.partial if axis not in axes}
    for axis in left.split_axes:
        assert left.dim_of(axis) == layout.dim_of(axis)


@given(layouts())
def test_renaming_and_renaming_back_changes_nothing(layout):
    away = {"batch": "zeta", "length": "alpha"}
    back = {new: old for old, new in away.items()}
    assert layout.rename(away).axes("alpha") == layout.axes("length")
    assert layout.rename(away).rename(back) == layout


@given(layouts(), st.permutations(DIMS), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_the_shards_along_the_split_axes_make_up_the_tensor(layout, order, factors):
    shape = Shape(dims(**{name: 24 * factor for name, factor in zip(order, factors, strict=True)}))
    local = layout.local(shape, MESH)
    assert local.names == shape.names
    assert local.volume * math.prod(MESH.sizes[axis] for axis in layout.split_axes) == shape.volume


def test_shards_of_a_size_that_does_not_divide_are_padded():
    shape = Shape(dims(batch=6))
    for axes in (["data"], ["pod", "data"]):
        local = TensorLayout.of({"batch": axes}).local(shape, MESH)
        assert local.sizes == (-(-6 // MESH.extent(axes)),)


def test_the_even_part_of_a_layout_needs_no_pads():
    layout = TensorLayout.of({"batch": ["pod", "data"], "embed": ["model"]}, {"x": "sum"})
    assert layout.even(Shape(dims(batch=6, embed=4)), Mesh.parse("pod:2,data:4,model:2,x:2")) == (
        TensorLayout.of({"batch": ["pod"], "embed": ["model"]}, {"x": "sum"})
    )


def test_show_gives_local_over_global_size_where_they_differ():
    layout = TensorLayout.of({"batch": ["pod", "data"]}, {"model": "sum"})
    shown = layout.show(Shape(dims(batch=16, embed=256)), MESH)
    assert shown == "[batch=2/16, embed=256] partial sum over model"


def test_print_form():
    assert str(TensorLayout()) == "replicated"
    assert str(TensorLayout.of({"b": ["pod", "data"]}, {"model": "max"})) == (
        "b:pod+data (partial max over model)"
    )


def test_cuts_are_the_sizes_of_the_axes_of_dims_with_pads():
    shape = Shape(dims(batch=6, embed=4, length=5))
    mesh = Mesh.parse("pod:2,data:4,one:1,model:2")
    layout = TensorLayout.of({"batch": ["pod", "one", "data"], "embed": ["model"]})
    assert layout.cuts(shape, mesh) == ((2, 4), (), ())
    assert TensorLayout.of({"embed": ["data"]}).cuts(shape, mesh) == ()
