"""Tensors drawn on the mesh, by axes rather than by devices."""

import re

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.program import Value
from meshdsl.reports.explain.html.placement import (
    axis_bar,
    block_drawing,
    mesh_drawing,
    type_of,
)
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import as_dtype

MESH = Mesh.parse("slice@dcn:2,data:8,model:8,expert:4")


def value(splits, mesh=MESH, **sizes):
    shape = Shape(Dimension(name, size) for name, size in sizes.items())
    layout = TensorLayout.of(splits)
    return Value(shape, as_dtype("float32"), layout, layout.local(shape, mesh))


@pytest.mark.parametrize(("axis", "pieces"), [("slice", 2), ("data", 8), ("expert", 4)])
def test_a_split_axis_is_a_bar_of_as_many_pieces(axis, pieces):
    bar = str(axis_bar(value({"embed": (axis,)}, embed=64), axis, MESH))
    assert bar.count("<i>") == pieces
    assert f"<b>embed</b> ÷{MESH.sizes[axis]}" in bar


def test_an_axis_without_a_say_is_one_piece_with_the_number_of_copies():
    bar = str(axis_bar(value({}, embed=64), "data", MESH))
    assert bar.count("<i>") == 1 and "8 copies" in bar


def test_the_order_of_two_axes_of_one_dim_is_told():
    both = value({"batch": ("slice", "data")}, batch=64)
    assert "(1 of 2)" in axis_bar(both, "slice", MESH)
    assert "(2 of 2)" in axis_bar(both, "data", MESH)


def test_pads_are_drawn_in_the_last_piece():
    assert 'class="pad"' in axis_bar(value({"vocab": ("data",)}, vocab=50_257), "data", MESH)
    assert 'class="pad"' not in axis_bar(value({"vocab": ("data",)}, vocab=50_264), "data", MESH)


@pytest.mark.parametrize("size", [16, 512, 4096])
def test_drawings_do_not_grow_with_the_number_of_devices(size):
    mesh = Mesh.parse(f"a:{size},b:{size}")
    x = value({"m": ("a",), "n": ("b",)}, mesh, m=size, n=size)
    assert axis_bar(x, "a", mesh).count("<i>") == 8
    assert block_drawing(x, mesh).count("<line") == 2 * 15


def sizes_of(drawing):
    """Returns width and height of the filled block of a drawing, of the whole sheet as 1."""
    (own,) = re.findall(r"<rect ([^>]*)class=\"own\"", drawing)
    found = dict(re.findall(r'(\w+)="([^"]*)"', own))
    return float(found["width"]) / 46, float(found["height"]) / 30


def test_the_block_of_one_device_is_to_scale():
    mesh = Mesh.parse("a:2,b:4")
    x = value({"m": ("a",), "n": ("b",)}, mesh, m=8, n=8)
    assert sizes_of(block_drawing(x, mesh)) == pytest.approx((1 / 4, 1 / 2))
    assert sizes_of(block_drawing(value({}, mesh, m=8), mesh)) == pytest.approx((1, 1))
    rows = value({"m": ("b",)}, mesh, m=8, n=8)
    assert sizes_of(block_drawing(rows, mesh)) == pytest.approx((1, 1 / 4))
    columns = value({"n": ("b",)}, mesh, m=8, n=8)
    assert sizes_of(block_drawing(columns, mesh)) == pytest.approx((1 / 4, 1))


def test_a_drawing_says_in_words_what_it_shows():
    x = value({"m": ("data",), "n": ("model",), "o": ("expert",)}, m=8, n=8, o=8)
    drawing = block_drawing(x, MESH)
    words = "one device holds 1 of 8 blocks of m × 8 blocks of n × 4 blocks of o"
    assert f'aria-label="{words}"' in drawing
    assert drawing.count('class="sheet"') == 2  # the third split dim: another sheet behind
    assert "the whole on every device" in block_drawing(value({}, m=8), MESH)


def test_types_show_local_and_global_sizes():
    assert type_of(value({"m": ("data",)}, m=64, n=3), MESH) == "f32[m=8/64, n=3]"


def test_a_mesh_shows_its_axes_and_which_are_slow():
    text = str(mesh_drawing(MESH))
    assert re.findall(r"<b>(\w+)</b> (\d+)", text) == [
        ("slice", "2"),
        ("data", "8"),
        ("model", "8"),
        ("expert", "4"),
    ]
    assert text.count("slow network") == 1
    assert str(mesh_drawing(Mesh())) == ""
