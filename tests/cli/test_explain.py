"""`meshdsl explain`: the training step of any job, on any mesh, on any machine."""

import json
import shlex

import jax
import pytest

from meshdsl.cli.flags import read
from meshdsl.cli.plan import machine_of
from meshdsl.cli.planning.commands import search_command, typed
from meshdsl.reports.stages import STAGES
from tests.cli.commands import explained, refused

LAYOUT = "--layout=batch:data; heads:model; d_ff:model; vocab:model; length:model?"


def test_the_largest_model_on_512_devices_is_explained_and_nothing_is_allocated(capsys):
    held = len(jax.live_arrays())
    report = explained(capsys, "--model=gpt3_175b", "--mesh_shape=data:64,model:8", LAYOUT)
    assert len(jax.live_arrays()) == held
    assert "512 devices" in report
    assert "174.6 B parameters" in report
    assert "blocks/attention/query" in report


@pytest.mark.long
def test_advice_that_is_taken_does_what_it_said_and_is_not_given_again(capsys):
    def tried(mesh):
        flags = (f"--mesh_shape={mesh}", f"{LAYOUT}; params/embed:data", "--json")
        return json.loads(explained(capsys, "--model=gpt3_175b", *flags))

    first = tried("data:64,model:8")
    assert first["smaller"].startswith("tried, the best first: --mesh_shape=data:128,model:4: ")
    (change,) = [c for c in first["changes"] if c["change"] == "--mesh_shape=data:128,model:4"]
    second = tried("data:128,model:4")
    assert second["peak_bytes"] == change["peak_bytes"] < first["peak_bytes"]
    assert "data:128,model:4" not in second["smaller"] + second["faster"]


@pytest.mark.long
def test_a_step_that_does_not_fit_is_told_how_many_microbatches_would(capsys):
    sizes = ("--batch_size=8192", "--length=1024", "--mesh_shape=data:2", "--hardware=v5e")
    flags = (*sizes, "--layout=batch:data", "--json")
    report = json.loads(explained(capsys, *flags))
    assert report["smaller"].startswith("tried, the best first: --microbatches=32: ")
    figures = {one["change"]: one["peak_bytes"] for one in report["changes"]}
    after = json.loads(explained(capsys, *flags, "--microbatches=32"))
    assert after["peak_bytes"] == figures["--microbatches=32"] < 16 * 2**30 < report["peak_bytes"]


@pytest.mark.long
def test_where_time_decides_it_decides_about_the_advice_too(capsys):
    mesh, remat = ("--mesh_shape=data:2,model:4", "--hardware=v5p"), "--remat=full"
    report = json.loads(explained(capsys, *mesh, LAYOUT, "--json"))
    figures = {one["change"]: one for one in report["changes"]}
    assert 0 < len(figures) <= 4
    after = json.loads(explained(capsys, *mesh, LAYOUT, "--json", remat))
    assert figures[remat]["peak_bytes"] == after["peak_bytes"] < report["peak_bytes"]
    assert remat in report["smaller"] and remat not in after["smaller"]


def test_where_no_single_change_fits_the_search_is_on_the_same_mesh(capsys, monkeypatch):
    monkeypatch.setattr("meshdsl.reports.explain.advice.misfits", lambda changes: True)
    flags = "--mesh_shape=data:2", "--layout=batch:data", "--remat=full"
    lines = explained(capsys, "--model=gpt_mini", *flags).splitlines()
    (line,) = [line for line in lines if line.startswith("    meshdsl plan ")]
    assert line.endswith(' --layout="batch:data; auto"')
    command = shlex.split(line)
    assert command[2:] == [
        *("--model=gpt_mini", "--mesh_shape=data:2", "--remat=full"),
        *("--hardware=v5p", "--layout=batch:data; auto"),
    ]


@pytest.mark.parametrize(
    ("given", "machine", "layout"),
    [
        (["--mesh_shape=data:2"], ("v5p", 2, 1), "auto"),
        (["--mesh_shape=data:2", "--layout="], ("v5p", 2, 1), "auto"),
        (["--mesh_shape=data:2", "--layout=auto"], ("v5p", 2, 1), "auto"),
        (
            ["--mesh_shape=data:2", "--hardware=a100", "--layout=batch:data"],
            ("a100", 2, 1),
            "batch:data; auto",
        ),
        (["--mesh_shape=data:2", "--slices=2"], ("v5p", 2, 1), "auto"),
        (["--topology=v5e:2x4"], ("v5e", 8, 1), "auto"),
        (["--topology=v5e:2x4", "--hardware=v5e", "--slices=2"], ("v5e", 16, 2), "auto"),
        (["--topology=v5e:2x4", "--mesh_shape=data:8", "--json"], ("v5e", 8, 1), "auto"),
        (["--topology=v5e:2x4", "--mesh_shape=data:4", "--slices=2"], ("v5p", 4, 1), "auto"),
    ],
)
def test_the_search_that_is_printed_is_one_that_plan_accepts(given, machine, layout):
    command = search_command(read(given, "explain")[0])
    start, plan, *arguments = shlex.split(command)
    assert (start, plan) == ("meshdsl", "plan")
    values, problems = read(arguments, "plan")
    found = machine_of(values, problems)
    assert problems.found == []
    assert (found.hardware, found.devices, found.slices) == machine
    assert str(values.layout) == layout


@pytest.mark.long
def test_a_topology_is_the_hardware_and_has_to_fit_the_mesh(capsys):
    mesh = ("--mesh_shape=data:8", "--layout=batch:data")
    found = explained(capsys, *mesh, "--topology=v5e:2x4")
    assert found == explained(capsys, *mesh, "--hardware=v5e")
    assert "TPU v5e" in found
    for arguments, problem in (
        (["--mesh_shape=data:4", "--topology=v5e:2x4"], "--mesh_shape: "),
        (["--topology=v5e:2x4"], "--topology: v5e:2x4: 8 devices of TPU v5e need a mesh: give"),
        ([*mesh, "--topology=v5e:2x4", "--hardware=v5e"], "--hardware: that of --topology is"),
        ([*mesh, "--topology=v5q:2x4"], "--topology: "),
        ([*mesh, "--slices=2"], "--slices are those of a --topology, which is missing"),
    ):
        assert problem in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--remat=full", "--remat=full"),
        ("--layout=batch:data; auto", '--layout="batch:data; auto"'),
        ("--model_args=a=1,b=x y", '--model_args="a=1,b=x y"'),
        ("--data=$HOME/a b", "'--data=$HOME/a b'"),
        ('--data="a b"', "'--data=\"a b\"'"),
        ("runs/a b", "'runs/a b'"),
    ],
)
def test_arguments_are_quoted_as_pages_quote_them_and_read_back_alike(argument, shown):
    assert typed(["meshdsl", argument]) == f"meshdsl {shown}"
    assert shlex.split(typed([argument])) == [argument]


def test_without_a_mesh_and_a_topology_there_is_no_search_to_print():
    given = ["--model=gpt_mini", "--hardware=a100", "--slices=2"]
    assert search_command(read(given, "explain")[0]) == ""


def test_collectives_have_the_line_that_they_come_from(capsys):
    report = explained(capsys, "--mesh_shape=data:2,model:4", LAYOUT)
    kinds = {"all_gather", "reduce_scatter", "all_reduce"}
    rows = [line.split() for line in report.splitlines() if line.split()[:1]]
    places = {row[0]: row[-1] for row in rows if row[0] in kinds}
    assert places.keys() == kinds
    assert all(place.rpartition(":")[2].isdigit() for place in places.values())


def test_models_of_volumes_are_explained_as_well(capsys):
    report = explained(
        capsys, "--model=unet3d_mini", "--mesh_shape=rows:8", "--layout=depth:rows", "--length=64"
    )
    assert "batch 4 × depth 64 × height 64 × width 64" in report
    assert "permute" in report and "models/layers/convolution.py:" in report


def test_without_a_mesh_nothing_is_on_the_wire(capsys):
    assert "all_reduce" not in explained(capsys, "--model=gpt_mini")


@pytest.mark.long
@pytest.mark.parametrize(
    "flag",
    [
        "--batch_size=32",
        "--length=64",
        "--clip_norm=0",
        "--steps=9",
        "--microbatches=4",
        "--remat=full",
        "--memory=16GiB",
        "--weights=keep",
        "--bucket_bytes=1MiB",
        "--overlap",
        "--mesh_shape=slice@dcn:2,data:4",
    ],
)
def test_the_flags_of_train_are_those_of_explain(capsys, flag):
    assert explained(capsys, flag)


def test_the_flags_change_the_job(capsys):
    report = explained(capsys, "--model_args=layers=2", "--batch_size=4", "--length=8")
    assert "batch 4 × length 8" in report
    assert "layers=2" in report


def test_a_policy_is_that_of_the_model(capsys):
    report = explained(capsys, "--policy=params=bfloat16,compute=bfloat16")
    assert "bf16[layers=4, embed=256" in report


MESH = "--mesh_shape=data:2,model:4"
SECOND = "--compare_layout=batch:data; heads:model; d_ff:model"


def test_a_page_is_written_instead_of_text(capsys, tmp_path):
    file = tmp_path / "made" / "report.html"
    told = explained(capsys, MESH, LAYOUT, f"--html={file}")
    assert told == f"{file} is written: open it in a browser\n"
    page = file.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "<title>train_step on data:2 model:4<" in page


@pytest.mark.long
def test_the_report_is_written_as_json(capsys):
    values = json.loads(explained(capsys, MESH, LAYOUT, "--hardware=h100", "--json"))
    assert (values["mesh"], values["hardware"]) == ("data:2 model:4", "NVIDIA H100 SXM")
    assert sum(values["memory"].values()) == values["peak_bytes"]


@pytest.mark.parametrize("other", [SECOND, "--html=x.html", "--stage=placed"])
def test_json_is_of_one_report(capsys, other):
    error = refused(capsys, MESH, LAYOUT, "--json", other)
    assert "--json prints one report: leave out --compare_layout, --html and --stage" in error


def test_two_layouts_are_compared_in_text(capsys):
    told = explained(capsys, MESH, LAYOUT, SECOND)
    assert told.startswith("train_step on data:2 model:4: 8 devices of TPU v5p, two layouts\n")
    assert "\n  B  batch:data; heads:model; d_ff:model\n" in told
    assert "embedding" in told.split("parameters that lie elsewhere")[1]


def test_two_layouts_are_compared_in_a_page(capsys, tmp_path):
    file = tmp_path / "report.html"
    explained(capsys, MESH, LAYOUT, SECOND, f"--html={file}")
    assert "train_step: two layouts" in file.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_time_is_for_the_hardware_that_is_asked_for(capsys):
    assert "at the peaks of TPU v5p: " in explained(capsys, MESH, LAYOUT)
    assert "at the peaks of NVIDIA H100 SXM: " in explained(capsys, MESH, LAYOUT, "--hardware=h100")


def test_a_second_layout_needs_a_mesh_and_has_to_fit_too(capsys):
    assert refused(capsys, SECOND) == (
        "meshdsl explain: --compare_layout needs a mesh: give --mesh_shape and --layout as well\n"
    )
    assert "`hedas:model` names a dim that this program does not have" in refused(
        capsys, MESH, LAYOUT, "--compare_layout=hedas:model"
    )
    assert refused(capsys, MESH, "--compare_layout=heads").startswith(
        "meshdsl explain: --compare_layout: malformed layout"
    )
    pair = refused(capsys, MESH, "--compare_layout=data:16 | batch:data")
    assert "--compare_layout: takes a layout on the mesh of --mesh_shape" in pair
    assert "`sweep` ranks pairs" in pair and "`plan --against`" in pair


def test_unknown_hardware_is_reported_with_the_known_ones(capsys):
    assert refused(capsys, "--hardware=v5x") == (
        "meshdsl explain: --hardware: unknown hardware 'v5x'; choose one of v3, v4, v5e, v5p, v6e, "
        "a100, h100, h200, b200, cpu, or a file of `meshdsl calibrate --out=mine.json`. Did you "
        "mean `v5p` or `v5e`?\n"
    )


def test_a_page_that_cannot_be_written_is_reported(capsys, tmp_path):
    assert refused(capsys, f"--html={tmp_path}") == (
        f"meshdsl explain: --html: cannot write {tmp_path}: is a directory\n"
    )


def test_every_stage_can_be_asked_for(capsys):
    assert tuple(STAGES) == ("simplified", "placed", "planned", "reduced", "written", "passes")
    assert "batch/tokens" in explained(capsys, MESH, LAYOUT, "--stage=placed")
    assert refused(capsys, MESH, LAYOUT, "--stage=plan").startswith("meshdsl explain: --stage")
    text = refused(capsys, MESH, LAYOUT, "--stage=placed", "--html=x.html")
    assert "--stage prints one stage as text" in text


def test_a_stage_is_that_of_the_program_which_time_decides(capsys):
    wide = (MESH, f"{LAYOUT}; params/embed:data", "--batch_size=256", "--length=512")
    usual = explained(capsys, *wide, "--stage=passes")
    decided = explained(capsys, *wide, "--stage=passes", "--hardware=v5p")
    assert usual != decided
