"""What a sweep is asked for: texts, files, alternatives, and what is wrong with them."""

import itertools

import pytest

from meshdsl.reports.sweeps.candidates import (
    MOST,
    Candidate,
    expanded,
    on_topologies,
    read,
    read_topologies,
)


def pairs(meshes, layouts):
    reading = read(meshes, layouts)
    assert reading.problems == []
    return [(one.mesh, one.layout) for one in reading.candidates]


def problems(meshes, layouts):
    return read(meshes, layouts).problems


def test_every_layout_goes_with_every_mesh():
    meshes, layouts = ["data:2,model:4", "data:8"], ["batch:data", "batch:data; heads:model", ""]
    found = pairs(meshes, layouts)
    assert sorted(found) == sorted(itertools.product(["data:2 model:4", "data:8"], layouts))


def test_alternatives_in_braces_are_all_combined():
    assert pairs(["data:{2,4},model:2"], ["heads:{model,-}; d_ff:{model,-}"]) == [
        (f"data:{n} model:2", f"heads:{heads}; d_ff:{d_ff}")
        for n in (2, 4)
        for heads in ("model", "-")
        for d_ff in ("model", "-")
    ]
    assert expanded("batch:data{, ; length:model?,; params/embed:data}") == [
        "batch:data",
        "batch:data; length:model?",
        "batch:data; params/embed:data",
    ]


def test_files_have_a_layout_or_a_pair_on_each_line_and_comments(tmp_path):
    (tmp_path / "a.txt").write_text(
        "# tensor parallelism\n\nbatch:data; heads:model  # heads\ndata:{4,8} | batch:data\n"
    )
    (tmp_path / "b.txt").write_text("batch:-")
    assert pairs(["data:2,model:2"], [f"{tmp_path}/*.txt"]) == [
        ("data:2 model:2", "batch:data; heads:model"),
        ("data:4", "batch:data"),
        ("data:8", "batch:data"),
        ("data:2 model:2", "batch:-"),
    ]


def test_meshes_come_from_files_as_well(tmp_path):
    (tmp_path / "meshes").write_text("data:2\nslice@dcn:2,data:4\n")
    assert pairs([str(tmp_path / "meshes")], ["batch:data"]) == [
        ("data:2", "batch:data"),
        ("slice@dcn:2 data:4", "batch:data"),
    ]


def test_a_layout_may_have_wildcards_as_long_as_it_has_a_colon():
    assert pairs(["data:2"], ["params/*/embed:data?"]) == [("data:2", "params/*/embed:data?")]


def test_what_is_written_twice_is_there_once_and_told():
    reading = read(["data:2"], ["batch:data", "batch:{data,-}", " batch:data;"])
    assert reading.candidates == [Candidate("data:2", "batch:data"), Candidate("data:2", "batch:-")]
    assert reading.repeated == [Candidate("data:2", "batch:data")]


def test_all_mistakes_are_told_with_the_places_where_they_stand(tmp_path):
    file = tmp_path / "layouts.txt"
    file.write_text("batch:data\nbatch=data:x\nx:2,y | batch:data\n")
    first, second, third = problems(["data:0"], [str(file)])
    assert first == "--mesh_shape: mesh axis `data` needs a size of at least 1, got 0"
    assert second.startswith(f"{file}:2: malformed layout\n  batch=data:x\n")
    assert third.startswith(f"{file}:3: malformed mesh: expected `axis:size`")


@pytest.mark.parametrize(
    ("meshes", "layouts", "problem"),
    [
        (
            [],
            ["batch:data"],
            "--layout: `batch:data` needs a mesh: give --mesh_shape, or write "
            "`data:8 | batch:data`",
        ),
        (
            ["data:2"],
            ["layouts.txtt"],
            "--layout: there is no file layouts.txtt; what is no file has a colon, as in data:8",
        ),
        (
            ["data:{2,4"],
            ["batch:data"],
            "--mesh_shape: `data:{2,4` has a brace without its other half, or braces in braces; "
            "alternatives are written {data,model,-}",
        ),
        (
            ["data:{" + ",".join(["1"] * (MOST + 1)) + "}"],
            ["batch:data"],
            "--mesh_shape: `data:{",
        ),
        (
            [f"data:{{{','.join(map(str, range(1, 201)))}}}"],
            ["batch:data; x:{" + ",".join(f"a{n}" for n in range(51)) + "}"],
            "--layout: there are more than 10,000 candidates",
        ),
    ],
)
def test_a_mistake_is_told_with_what_to_write(meshes, layouts, problem):
    (found,) = problems(meshes, layouts)
    assert found.startswith(problem)


def test_files_that_cannot_be_read_are_told(tmp_path):
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert problems(["data:2"], [str(tmp_path / "empty"), str(tmp_path / "binary")]) == [
        f"--layout: {tmp_path / 'empty'} has no line to read",
        f"--layout: cannot read {tmp_path / 'binary'}: it is not text in utf-8",
    ]


# Topologies.


def on(topologies, *meshes, layouts=("batch:data",), slices=1):
    machines, wrong = read_topologies(topologies, slices)
    assert wrong == []
    return on_topologies(read(meshes, layouts), [*machines.values()])


def test_each_mesh_goes_with_the_topologies_that_it_covers():
    reading = on(["v5e:2x{2,4}", "h100:8x1", "v5e:2x4"], "data:{4,8}", layouts=["x:data", "y:data"])
    assert reading.problems == []
    assert reading.candidates == [
        Candidate(f"data:{size}", layout, topology)
        for size, layout, topology in [
            (4, "x:data", "v5e:2x2"),
            (8, "x:data", "v5e:2x4"),
            (8, "x:data", "h100:8x1"),
            (4, "y:data", "v5e:2x2"),
            (8, "y:data", "v5e:2x4"),
            (8, "y:data", "h100:8x1"),
        ]
    ]
    assert str(reading.candidates[0]) == "data:4 | x:data | on v5e:2x2"


def test_slices_are_of_every_topology_and_need_a_marked_axis():
    (one,) = on(["v5e:2x4"], "slice@dcn:2,data:8", slices=2).candidates
    assert one.topology == "2 slices of v5e:2x4"
    assert on(["v5e:2x4"], "slice:2,data:8", slices=2).problems == [
        "--mesh_shape: mesh slice:2 data:8 covers no topology: there are 2 slices, but no mesh "
        'axis goes across them: mark one of that size, as in --mesh_shape="slice@dcn:2,..."'
    ]
    _, wrong = read_topologies(["h100:8x2"], 2)
    assert wrong == [
        "--topology: GPUs have no slices; more nodes are written as h100:8x4, GPUs of a node "
        "first: leave out --slices"
    ]


def test_meshes_and_topologies_that_cover_each_other_nowhere_are_told():
    nowhere = (
        "--mesh_shape: mesh data:3 covers no topology:\n"
        "  mesh data:3 has 3 devices, but v5e:2x4 has 8: a mesh has one device for each\n"
        "  mesh data:3 has 3 devices, but h100:8x2 has 16: a mesh has one device for each"
    )
    assert on(["v5e:2x4", "h100:8x2"], "data:3").problems == [nowhere]
    with pytest.warns(UserWarning) as told:
        reading = on(["v5e:2x4", "h100:8x2"], "data:8", "data:3", "data:16")
    assert [str(each.message) for each in told] == [f"{nowhere}\n  It is left out"]
    assert [one.topology for one in reading.candidates] == ["v5e:2x4", "h100:8x2"]
    with pytest.warns(UserWarning, match="--topology: no mesh covers h100:8x2: mesh data:8 has 8"):
        assert on(["v5e:2x4", "h100:8x2"], "data:8").problems == []


def test_topologies_that_there_are_not_are_all_told():
    machines, wrong = read_topologies(["v5e:{2x3,2x4", "v5e:{2x3,2x4}", "v5x:2x4"], 1)
    assert list(machines) == ["v5e:2x4"]
    assert len(wrong) == 3
    assert wrong[0].startswith("--topology: `v5e:{2x3,2x4` has a brace without its other half")
    assert "no topology v5e:2x3" in wrong[1] and "unknown topology 'v5x'" in wrong[2]
