"""Topologies: names of machines, how many devices they have, and what is wrong with others."""

import pytest

from meshdsl.layouts.hardware import HARDWARE
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import FAMILIES, Topology


@pytest.mark.parametrize(
    ("text", "devices", "hardware", "gib"),
    [
        ("v3:2x2", 8, "v3", 16),  # 4 chips of two cores, each a device
        ("v3:32x32", 2048, "v3", 16),
        ("v4:2x2x1", 4, "v4", 32),
        ("v4:12x16x16", 3072, "v4", 32),
        ("v5e:2x4", 8, "v5e", 16),
        ("v5e:16x16", 256, "v5e", 16),
        ("v5p:8x8x8", 512, "v5p", 95),
        ("v5p:16x16x24", 6144, "v5p", 95),
        ("v6e:4x8", 32, "v6e", 32),
        ("a100:4", 4, "a100", 80),
        ("h100:8x16", 128, "h100", 80),
        ("h200:8x1", 8, "h200", 141),
        ("b200:8x2", 16, "b200", 180),
    ],
)
def test_a_topology_has_devices_of_one_kind(text, devices, hardware, gib):
    found = Topology.parse(text)
    assert (found.devices, found.hardware.name) == (devices, hardware)
    assert found.memory_bytes == gib * 2**30
    assert str(found) == text


def test_slices_have_as_many_devices_each():
    found = Topology.parse("v5e:16x16", slices=2)
    assert (found.devices, found.devices_of_slice) == (512, 256)
    assert str(found) == "2 slices of v5e:16x16"


def test_every_family_has_its_figures():
    assert FAMILIES.keys() == HARDWARE.keys() - {"cpu"}


def refused(text, slices=1):
    with pytest.raises(ValueError) as error:
        Topology.parse(text, slices)
    return str(error.value)


def test_an_unknown_name_is_told_with_the_nearest():
    assert refused("v5:8x8x8") == (
        "unknown topology 'v5'; choose one of v3, v4, v5e, v5p, v6e, a100, h100, h200, b200. "
        "Did you mean `v5p` or `v5e`?"
    )
    assert refused("v9-1024").endswith(". A topology is written v5p:8x8x8 or h100:8x16")
    assert refused("V5P-x").endswith("v5p:8x8x8 or h100:8x16. Did you mean `v5p`?")


@pytest.mark.parametrize(
    ("text", "counts", "written"),
    [
        ("v5p-128", "cores, so it has 64 chips", "v5p:4x4x4"),
        ("V5P-1024", "cores, so it has 512 chips", "v5p:4x8x16 or v5p:8x8x8"),
        ("v4-8", "cores, so it has 4 chips", "v4:2x2x1"),
        ("v3-8", "cores, so it has 4 chips", "v3:2x2"),
        ("v5litepod-16", "chips", "v5e:4x4"),
        ("v6e-8", "chips", "v6e:2x4"),
    ],
)
def test_an_accelerator_type_is_told_as_the_topology_that_it_is(text, counts, written):
    assert refused(text) == (
        f"{text!r} is written as an accelerator type of Cloud TPU, which counts {counts}. A "
        f"topology is written with the chips along each direction of a slice: {written}"
    )


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("v6e-7", "v6e:2x4"), ("v4-99999", "v4:12x16x16"), ("v5p-1", "v5p:2x2x1")],
)
def test_an_accelerator_type_that_there_is_not_has_the_nearest(text, nearest):
    assert refused(text).endswith(f". There is none of that size; the nearest is {nearest}")


@pytest.mark.parametrize("text", ["v5p", "v5p:", "v5p:8x8x", "v5p:8,8,8", "v5p:8x8x8x"])
def test_a_shape_that_cannot_be_read(text):
    assert refused(text) == (
        f"needs a name and a shape, as in v5p:8x8x8 or h100:8x16, got {text!r}; "
        "TPU v5p has slices of 3 directions, from 2x2x1 to 16x16x24"
    )


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("v5p:8x8x9", "v5p:8x8x8, v5p:8x8x12, v5p:8x8x16"),
        ("v5p:8x8x4", "v5p:4x8x8, v5p:4x8x12, v5p:4x4x8"),  # the order is ascending
        ("v5e:16x32", "v5e:16x16, v5e:8x16, v5e:8x8"),
        ("v5e:3x4", "v5e:4x4, v5e:2x4, v5e:4x8"),
        ("v5e:4x4x4", "v5e:8x8, v5e:4x8, v5e:8x16"),
    ],
)
def test_a_shape_that_there_is_not_is_told_with_the_nearest(text, nearest):
    message = refused(text)
    assert message.startswith(f"no topology {text}; TPU {text[:3]} has slices of ")
    assert message.endswith(f". Nearest: {nearest}")


def test_sizes_of_zero_are_no_shape():
    assert refused("v5p:0x0x0").startswith("no topology v5p:0x0x0")
    assert refused("h100:8x0").startswith("no topology h100:8x0")


@pytest.mark.parametrize(
    ("text", "nearest"), [("h100:16x8", "h100:8x16"), ("h100:4x4", "h100:8x2"), ("b200:9", None)]
)
def test_nodes_have_eight_gpus(text, nearest):
    name = text[:4]
    assert refused(text) == (
        f"no topology {text}; {name} has GPUs of a node, then nodes: nodes have 8 GPUs, a single "
        f"one less. Nearest: {nearest or 'b200:8x2'}"
    )


def test_what_has_no_slices():
    assert refused("v3:4x4", slices=2) == ("slices of TPU v3 cannot be joined: leave out --slices")
    assert refused("h100:8x16", slices=2) == (
        "GPUs have no slices; more nodes are written as h100:8x32, GPUs of a node first: leave "
        "out --slices"
    )


def problems(text, mesh, slices=1):
    return Topology.parse(text, slices).problems(Mesh.parse(mesh))


def test_a_mesh_covers_the_machine():
    assert problems("v5p:8x8x8", "data:64,model:8") == []
    assert problems("v5e:16x16", "slice@dcn:2,data:32,model:8", slices=2) == []
    assert problems("h100:8x16", "data@dcn:16,model:8") == []
    assert problems("h100:8x16", "data:16,model:8") == []


def test_all_that_is_wrong_with_a_mesh_is_told():
    assert problems("v5e:2x4", "data:4,model:4") == [
        "mesh data:4 model:4 has 16 devices, but v5e:2x4 has 8: a mesh has one device for each"
    ]
    assert problems("v5e:2x4", "data:8", slices=2) == [
        "mesh data:8 has 8 devices, but 2 slices of v5e:2x4 have 16: a mesh has one device "
        "for each",
        "there are 2 slices, but no mesh axis goes across them: mark one of that size, as in "
        '--mesh_shape="slice@dcn:2,..."',
    ]
    assert problems("v5e:2x4", "slice@dcn:2,data:4") == [
        "the mesh axes that go across slices (slice@dcn) have 2 positions, but there is 1 slice: "
        "give --slices=2, or leave the mark out"
    ]
    assert problems("v5e:2x4", "slice@dcn:2,data:8") == [
        "the mesh axes that go across slices (slice@dcn) have 2 positions, but there is 1 slice: "
        "give --slices=2, or leave the mark out"
    ]
    assert problems("v5e:2x4", "") == [
        "v5e:2x4 has 8 devices, but there is no mesh: a mesh has one device for each, as in "
        '--mesh_shape="data:8"'
    ]
    (told,) = problems("v5e:2x4", "", slices=2)
    assert told.endswith('--mesh_shape="slice@dcn:2,data:8"')
    assert "(one@dcn, two@dcn) have 4 positions, but there are 2 slices" in " ".join(
        problems("v5e:2x4", "one@dcn:2,two@dcn:2,data:4", slices=2)
    )
