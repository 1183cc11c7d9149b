"""Meshes: their text, their numbering, and malformed ones."""

import itertools

import numpy as np
import pytest

import meshdsl as md


@pytest.mark.parametrize(
    "text", ["data:2 model:4", "data:2,model:4", "data:2; model:4 ", "data:2;model:4"]
)
def test_all_separators_are_read(text):
    mesh = md.Mesh.parse(text)
    assert mesh == md.Mesh((("data", 2), ("model", 4)))
    assert md.Mesh.parse(str(mesh)) == mesh
    assert mesh.size == 8
    assert mesh.names == ("data", "model")
    assert mesh.extent(["model"]) == 4
    assert mesh.extent([]) == 1


def test_a_mesh_without_axes_is_one_device():
    assert md.Mesh.parse("").size == md.Mesh().size == 1
    assert list(md.Mesh().coordinates()) == [{}]


def test_the_last_axis_varies_fastest():
    mesh = md.Mesh.parse("a:2 b:3 c:2")
    expected = [
        dict(zip("abc", at, strict=True)) for at in itertools.product(*map(range, (2, 3, 2)))
    ]
    assert list(mesh.coordinates()) == expected


def test_groups_are_numbered_major_axis_first():
    mesh = md.Mesh.parse("a:2 b:2 c:2")
    assert mesh.groups("b") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("c", "a") == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert mesh.groups() == tuple((i,) for i in range(8))


def test_groups_are_those_of_megatron():
    """As listed in Megatron-LM's `parallel_state.initialize_model_parallel`, for 16 GPUs."""
    mesh = md.Mesh.parse("pipeline:4,data:2,tensor:2")
    assert mesh.groups("data") == (
        (0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)
    )  # fmt: skip
    assert mesh.groups("tensor") == (
        (0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)
    )  # fmt: skip
    assert mesh.groups("pipeline") == (
        (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)
    )  # fmt: skip


@pytest.mark.parametrize("order", [*itertools.permutations(["pipeline", "data", "tensor"])])
def test_groups_are_rows_of_a_turned_array_in_any_order_of_axes(order):
    sizes = {"pipeline": 4, "data": 2, "tensor": 3}
    mesh = md.Mesh(tuple((name, sizes[name]) for name in order))
    devices = np.arange(24).reshape([sizes[name] for name in order])
    for count in range(4):
        for axes in itertools.permutations(order, count):
            rest = [name for name in order if name not in axes]
            turned = devices.transpose([order.index(name) for name in [*rest, *axes]])
            rows = turned.reshape(-1, mesh.extent(axes)).tolist()
            assert [list(group) for group in mesh.groups(*axes)] == rows


def test_axes_between_slices_are_marked():
    mesh = md.Mesh.parse("slice@dcn:2,data:4; model:4")
    assert mesh.slow == {"slice"}
    assert mesh.axes == (("slice", 2), ("data", 4), ("model", 4))
    assert str(mesh) == "slice@dcn:2 data:4 model:4"
    assert md.Mesh.parse(str(mesh)) == mesh
    assert mesh != md.Mesh.parse("slice:2,data:4,model:4")
    assert md.Mesh.parse("a@dcn:2 b@dcn:2").slow == {"a", "b"}
    assert md.Mesh.parse("data:4").slow == frozenset()


def test_a_mark_does_not_change_the_numbering():
    marked, plain = md.Mesh.parse("slice@dcn:2,data:4"), md.Mesh.parse("slice:2,data:4")
    assert list(marked.coordinates()) == list(plain.coordinates())
    assert marked.groups("slice") == plain.groups("slice")


def test_a_network_that_does_not_exist_is_told():
    with pytest.raises(ValueError) as error:
        md.Mesh.parse("slice@foo:2,data:4")
    assert str(error.value) == (
        "mesh axis `slice@foo` is on an unknown network; `@dcn` marks an axis between slices, "
        "others have no mark"
    )
    for text in ("slice@:2", "slice@dcn", "slice@dcn@dcn:2", "@dcn:2", "slice@DCN:2"):
        with pytest.raises(ValueError, match="malformed mesh"):
            md.Mesh.parse(text)


def test_a_slow_axis_that_does_not_exist_is_told():
    with pytest.raises(ValueError) as error:
        md.Mesh((("slice", 2), ("data", 4)), slow=frozenset(["slices"]))
    assert str(error.value).startswith("no axis `slices` in mesh `slice:2 data:4")
    assert "Did you mean `slice`?" in str(error.value)


def test_malformed_text_is_marked():
    with pytest.raises(ValueError) as error:
        md.Mesh.parse("data:2 model=4 x:1")
    assert str(error.value) == (
        "malformed mesh: expected `axis:size`, as in `data:2 model:4`\n"
        "  data:2 model=4 x:1\n"
        "         ^^^^^^^"
    )


@pytest.mark.parametrize("text", ["data", "data:", ":2", "data:x", "data:-1", "2:2"])
def test_other_malformed_text(text):
    with pytest.raises(ValueError, match="malformed mesh"):
        md.Mesh.parse(text)


def test_sizes_and_names_are_checked():
    with pytest.raises(ValueError, match="mesh axis `a` needs a size of at least 1, got 0"):
        md.Mesh.parse("a:0")
    with pytest.raises(ValueError, match="mesh axis `a` is given twice in `a:2 b:2 a:4`"):
        md.Mesh.parse("a:2 b:2 a:4")
