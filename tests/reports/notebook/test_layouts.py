"""Layouts and meshes in a notebook."""

import pytest

import meshdsl as md
from meshdsl.reports.notebook.chips import dim_colour
from tests.reports.notebook.cells_of import read


def test_a_layout_shows_each_rule_with_what_it_does():
    layout = md.Layout.parse("batch:data; params/embed:slice+data?; vocab:-")
    cell = read(layout._repr_html_())
    rows = [text for text in cell.texts("tr") if ":" in text]
    assert rows == [
        "batch:databatchdataevery tensor",
        "params/embed:slice+data?embedslice then datapaths with params, "
        "where no other dim has the axis",
        "vocab:-vocabnot splitevery tensor",
    ]


def test_text_of_users_is_no_markup():
    text = md.Layout.parse("a<b>&x/embed:data")._repr_html_()
    assert "<b>&x" not in text and "a<b>&x" in "".join(read(text).elements[0][2])


def test_a_layout_without_rules_and_a_mesh_without_axes_say_so():
    assert "no rules" in md.Layout()._repr_html_()
    assert "one device" in md.Mesh()._repr_html_()


@pytest.mark.parametrize(
    ("mesh", "drawn"), [("data:4,model:2", 8), ("a:2,b:3,c:2", 12), ("a:5", 5)]
)
def test_a_mesh_shows_its_devices_in_their_order(mesh, drawn):
    mesh = md.Mesh.parse(mesh)
    cell = read(mesh._repr_html_())
    assert cell.texts("b", "device") == [str(number) for number in range(mesh.size)]
    assert cell.texts("span", "axis") == [f"{name}{size}" for name, size in mesh.axes]


def test_a_mesh_of_many_devices_shows_some_and_counts_the_others():
    mesh = md.Mesh.parse("slice@dcn:2,data:64,model:32")
    text = mesh._repr_html_()
    shown = [int(number) for number in read(text).texts("b", "device")]
    at = list(mesh.coordinates())
    assert [at[number]["model"] for number in shown] == [*range(8)] * 8
    assert [at[number]["data"] for number in shown[::8]] == [*range(8)]
    assert "and 4,032 more devices" in text and "slow network" in text and len(text) < 12_000


def test_a_dim_has_one_colour_and_usual_dims_have_different_ones():
    usual = ["batch", "length", "embed", "heads", "d_ff", "vocab", "layers", "experts"]
    assert len({dim_colour(name) for name in usual}) == len(usual)
    assert dim_colour("pixel") == "hsl(74 48% 52%)"  # of every session
