"""Modules, trees and what has no data, in a notebook."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.reports.notebook import trees
from tests.reports.notebook.cells_of import read

pixel, hidden, digit = md.dims(pixel=64, hidden=256, digit=10)


class Linear(md.Module):
    weight: md.Tensor
    bias: md.Tensor | None = None


class Classifier(md.Module):
    layers: list
    scale: object
    name: str = md.static(default="<b>bold</b>")


def model(layers=2):
    weight = md.named(np.ones((64, 256), np.float32), [pixel, hidden])
    bias = md.named(np.ones(10, np.float16), [digit])
    parts = [Linear(weight, bias), *(Linear(weight) for _ in range(layers - 1))]
    return Classifier(parts, {"a<b": jnp.ones((3,), jnp.int32), "rate": 0.5})


def test_a_module_shows_its_fields_with_the_sizes_of_every_part():
    cell = read(model()._repr_html_())
    first, layers, linear, *_ = cell.texts("summary")
    count = sum(leaf.size for leaf in jax.tree.leaves(model()) if hasattr(leaf, "size"))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model()) if hasattr(leaf, "size"))
    assert first.startswith("Classifier name='<b>bold</b>'")
    assert f"4 arrays, {count:,} elements, {size / 1024:.0f} KiB" in first
    assert layers.startswith("layerslist") and linear.startswith("0Linear")
    rows = cell.texts("div", "leaf")
    assert rows[:2] == ["weightf32pixel64hidden25664.0 KiB", "biasf16digit1020 B"]
    assert rows[3] == "biasNone"
    assert rows[4:] == ["a<bint32 3, without names", "rate0.5"]


def test_only_the_outermost_level_is_unfolded():
    opened = [a for tag, a, _ in read(model()._repr_html_()).elements if tag == "details"]
    assert ["open" in attributes for attributes in opened] == [True] + [False] * 4


def test_a_large_model_is_cut_and_says_what_is_left_out():
    text = model(layers=3000)._repr_html_()
    cell = read(text)
    assert len(cell.texts("div", "leaf")) < 320 and len(text) < 120_000
    assert "… and 2,960 more" in cell.texts("div", "leaf")
    assert "3,002 arrays" in cell.texts("summary")[0]


def test_the_sizes_of_a_device_are_those_of_its_shards():
    whole = model()
    array = md.place(whole.layers[0].weight, "data:2,model:4", "hidden:model; pixel:data")
    node = trees.tree(Linear(array))
    assert node.local_bytes == array.data.addressable_shards[0].data.nbytes
    cell = read(Linear(array)._repr_html_())
    assert cell.texts("div", "leaf")[0] == (
        "weightf32pixel32/64 ÷ datahidden64/256 ÷ model8.0 KiB of 64.0 KiB"
    )
    assert "8.0 KiB on a device" in cell.texts("summary")[0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (md.spec([pixel, hidden], "bfloat16"), "bf16pixel64hidden25632.0 KiB"),
        (md.Shape([pixel, digit]), "pixel64digit10"),
        (md.Shape(), "no dims"),
        (pixel, "pixel64"),
    ],
)
def test_what_has_dims_shows_them(value, says):
    text = "".join(read(value._repr_html_()).elements[0][2])
    assert text.endswith(says)


def test_a_traced_tensor_shows_the_line_that_made_it():
    seen = []

    @md.jit
    def f(x):
        y = x * 2
        seen.append(y._repr_html_())
        return y

    f.lower(md.spec([pixel]))
    cell = read(seen[0])
    assert cell.texts("span", "chip") == ["pixel64"] and "test_trees.py" in cell.texts("code")[-1]
    assert [a["title"] for _, a, _ in cell.elements if "title" in a] == ["y = x * 2"]


def test_a_tree_may_hold_whatever_jax_puts_in_place_of_arrays():
    dims = md.Shape([pixel])
    tree = Linear(md.NamedArray(None, dims), jax.ShapeDtypeStruct((3,), "float32"))
    assert len(read(tree._repr_html_()).texts("div", "leaf")) == 2
