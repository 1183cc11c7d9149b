"""Dimensions and shapes: what they accept, and how they tell what they do not."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors.dims import did_you_mean, misspelt

batch, embed = md.dims(batch=8, embed=256)


def test_dims_come_in_keyword_order():
    assert md.dims(b=2, a=3) == (md.Dimension("b", 2), md.Dimension("a", 3))
    assert str(batch) == "batch=8"


def test_dims_are_values():
    assert md.Dimension("a", np.int64(3)) == md.Dimension("a", 3)
    assert {batch: 1}[md.Dimension("batch", 8)] == 1


@pytest.mark.parametrize("name", ["", "2d", "a-b", "a b", 3])
def test_a_name_is_an_identifier(name):
    with pytest.raises(ValueError, match="cannot name a dim: use letters, digits and underscores"):
        md.Dimension(name, 2)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_a_size_is_a_positive_integer(size):
    with pytest.raises(ValueError, match="dim `a` needs a positive integer size, got"):
        md.Dimension("a", size)


def test_a_shape_knows_its_dims():
    shape = md.Shape([batch, embed])
    assert shape.names == ("batch", "embed")
    assert shape.sizes == (8, 256)
    assert shape.volume == 2048
    assert md.Shape().volume == 1
    assert shape.find("embed") == embed
    assert shape.find("x") is None
    assert shape.get(embed) is shape.get("embed")
    assert shape.select(["embed", batch]) == md.Shape([embed, batch])
    assert shape.select("embed") == md.Shape([embed])
    assert shape.position("embed") == 1
    assert shape.without(["batch"]) == md.Shape([embed])
    assert str(shape) == "[batch=8, embed=256]"


def test_a_shape_tells_what_it_lacks():
    shape = md.Shape([batch, embed])
    with pytest.raises(ValueError, match=r"no dim `embd` in \[.*\]\. Did you mean `embed`\?"):
        shape.get("embd")
    with pytest.raises(ValueError, match=r"dim `embed` has size 256 in \[.*\], not 8"):
        shape.get(md.Dimension("embed", 8))


def test_one_name_occurs_once():
    with pytest.raises(ValueError, match="two dims of one name: `batch` occurs twice in"):
        md.Shape([batch, embed, batch])


def test_near_names_are_suggested():
    assert did_you_mean("lenght", ["length", "width"]) == ". Did you mean `length`?"
    assert did_you_mean("rwoo", ["col", "row"]) == ". Did you mean `row`?"
    assert did_you_mean("batch", ["col", "row", "bat"]) == ". Did you mean `bat`?"
    assert did_you_mean("wor", ["col", "row"]) == did_you_mean("", ["col"]) == ""
    assert did_you_mean("xyz", ["length"]) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("embed", "emebd"),
        ("batch", "bach"),
        ("heads", "head"),
        ("kv_heads", "kv_head"),
        ("channels", "channel"),
        ("features", "feature"),
        ("d_ff", "dff"),
        ("d_ff", "d_fff"),
        ("embed", "embedd"),
        ("hidden", "hiden"),
    ],
)
def test_names_that_differ_by_a_slip_are_misspelt(one, other):
    assert misspelt(one, other)
    assert misspelt(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("row", "rows"),
        ("a", "aa"),
        ("d_f", "d_ff"),
        ("a1", "a2"),
        ("length", "length_"),
        ("x_in", "y_in"),
        ("query", "queries"),
        ("experts", "routed"),
        ("heads", "kv_heads"),
        ("embed", "next_embed"),
    ],
)
def test_names_that_differ_on_purpose_are_not_misspelt(one, other):
    assert not misspelt(one, other)
    assert not misspelt(other, one)


@pytest.mark.parametrize(
    "use",
    [
        lambda dim: md.named(np.ones((2, 3)), ["a", dim]),
        lambda dim: md.spec([dim]),
        lambda dim: md.zeros([dim]),
        lambda dim: md.sum(md.ones(md.dims(embed=3)), [dim]),
        lambda dim: md.take(md.ones(md.dims(embed=3)), 0, dim),
        lambda dim: md.Shape(md.dims(embed=3)).get(dim),
    ],
)
def test_a_tuple_of_one_dim_is_refused_with_the_comma_that_is_missing(use):
    with pytest.raises(ValueError, match=r"so write `embed, = md\.dims\(embed=3\)`, with a comma"):
        use(md.dims(embed=3))
