"""`auto` of train, explain and compile: the line that is found, and the same after a restart."""

import json
import re

import pytest

from meshdsl.cli.flags import read
from meshdsl.cli.main import run
from meshdsl.cli.planning.automatic import settled
from meshdsl.cli.planning.searched import Asked, Machine
from meshdsl.search.plans import Effort
from meshdsl.search.steps import recipe_step

SMALL = ("--model=gpt_mini", "--model_args=layers=1,embed=32,heads=2,d_ff=64")
BATCH = ("--batch_size=8", "--length=16")
CHOSEN = re.compile(
    r'chosen: --mesh_shape="([^"]+)" --layout="([^"]+)" --microbatches=(\d+).* per step by'
)


CHOSEN_BOTH = re.compile(r'chosen: --mesh_shape="[^"]+" --layout="[^"]+" \(')


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    """Makes searches short: what they find is tested beside them."""

    def effort(values, **rest):
        return Effort(estimated=12, tried=1, decided=1, **rest)

    monkeypatch.setattr("meshdsl.cli.planning.automatic.effort_of", effort)


@pytest.mark.long
def test_what_was_chosen_is_not_mixed_with_json(capsys):
    assert run(["explain", *SMALL, "--topology=v5e:2x2", "--layout=auto", "--json"]) == 0
    captured = capsys.readouterr()
    layout = json.loads(captured.out)["layout"]
    assert captured.err.startswith("chosen: ") and f'--layout="{layout}"' in captured.err


@pytest.mark.long
def test_explain_finds_what_is_left_to_it(capsys):
    machine = "--topology=v5e:2x2"
    assert run(["explain", *SMALL, machine, "--layout=auto", "--microbatches=auto"]) == 0
    text = capsys.readouterr().out
    mesh, layout, _ = CHOSEN.match(text).groups()
    assert f"train_step on {mesh.replace(',', ' ')}: 4 devices" in text
    assert f"\nlayout {layout}\n" in text and "at the peaks of TPU v5e" in text
    assert run(["explain", *SMALL, machine, "--mesh_shape=auto", "--layout=d_ff:x; batch:y"]) == 0
    text = capsys.readouterr().out
    assert text.startswith('chosen: --mesh_shape="x:2,y:2" (') and "\nlayout d_ff:x" in text
    given = "--mesh_shape=x:2,y:2", "--layout=d_ff:x; auto"
    assert run(["explain", *SMALL, *given, "--hardware=h100"]) == 0
    assert capsys.readouterr().out.startswith('chosen: --layout="d_ff:x; ')
    assert run(["explain", *SMALL, machine, "--mesh_shape=auto"]) == 0
    assert CHOSEN_BOTH.match(capsys.readouterr().out)
    given = "--mesh_shape=x:4", "--layout=batch:x", "--remat=auto", "--microbatches=auto"
    assert run(["explain", *SMALL, *given]) == 0
    assert capsys.readouterr().out.startswith("chosen:")


def test_without_a_layout_microbatches_are_those_of_replicated_tensors(capsys):
    assert run(["explain", *SMALL, "--mesh_shape=x:4", "--microbatches=auto"]) == 0
    text = capsys.readouterr().out
    seconds = re.match(r"chosen: --microbatches=\d+ \((.*?) per step", text)[1]
    assert f"simulated: {seconds} per step" in text


def test_every_batch_of_a_ramp_can_be_computed_in_the_microbatches(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "meshdsl.cli.planning.searched.recipe_step",
        lambda recipe, batch, counts, *rest: seen.append(counts) or recipe_step(recipe, batch),
    )
    ramp = "--batch_ramp=2,2,100", "--batch_size=8"
    given = "--mesh_shape=x:2", "--layout=batch:x", "--microbatches=auto"
    assert run(["explain", *SMALL, *ramp, *given]) == 0
    assert seen == [(1, 2)]


def test_compile_finds_a_layout_for_its_topology(capsys):
    assert run(["compile", *SMALL, *BATCH, "--topology=h100:4", "--layout=auto"]) == 0
    text = capsys.readouterr().out
    mesh, layout = re.match(r'chosen: --mesh_shape="(\S+)" --layout="([^"]+)"', text).groups()
    assert mesh.replace(",", " ") in text.split("\n", 1)[1] and layout in text.split("\n", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "--mesh_shape=auto", "--layout=auto"], "--topology says what to plan for"),
        (["compile", "--mesh_shape=auto"], "--topology says what to compile for"),
        (
            ["explain", "--topology=v5e:2x2", "--layout=auto", "--memory=1KiB"],
            "no layout fits: .* `meshdsl plan` finds out what makes it fit",
        ),
        (
            ["train", "--backend=numpy", "--layout=auto"],
            "--mesh_shape=auto: --backend=numpy needs a mesh",
        ),
    ],
)
def test_what_cannot_be_found_is_explained(capsys, arguments, says):
    command, *rest = arguments
    assert run([command, *SMALL, *rest]) == 2
    assert re.search(says, capsys.readouterr().err, re.S)


def test_a_misspelt_backend_is_the_only_problem(capsys):
    assert run(["train", *SMALL, "--backend=nunpy", "--layout=auto", "--data=x.txt"]) == 2
    text = capsys.readouterr().err
    assert "--backend: " in text and "Mistake" not in text and "needs a mesh" not in text


@pytest.fixture
def searches(monkeypatch):
    """Returns a list to which each search adds an entry."""
    made = []
    search = Asked.search

    def counted(*arguments, **rest):
        made.append(arguments)
        return search(*arguments, **rest)

    monkeypatch.setattr(Asked, "search", counted)
    return made


@pytest.mark.long
def test_a_run_keeps_its_layout_when_it_goes_on(capsys, tmp_path, searches):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    workdir = tmp_path / "run"
    auto = "--layout=batch:data; auto", "--mesh_shape=data:2,model:2", "--remat=auto"
    job = ["train", *SMALL, *BATCH, f"--data={tmp_path}/text.txt", "--host_devices=8", "--steps=4"]
    job += [*auto, f"--workdir={workdir}", "--checkpoint_every=2", "--eval_batches=1"]
    assert run([*job, "--exit_at_step=2"]) == 75
    head, chosen = capsys.readouterr().out.splitlines()[:2]
    layout = re.match(r'chosen: --layout="([^"]+)"', chosen)[1]
    assert "mesh data:2 model:2" in head and len(searches) == 1
    record = json.loads((workdir / "plan.json").read_text())
    assert record["found"]["layout"] == layout and record["asked"]["devices"] == "4"
    assert run(job) == 0
    printed = capsys.readouterr().out
    again = chosen.replace("chosen:", "the layout of the earlier start:").partition(" (")[0]
    assert again in printed.splitlines()
    assert "step 4/4" in printed and len(searches) == 1


@pytest.mark.long
def test_on_other_devices_a_run_has_another_mesh_and_its_microbatches():
    values, problems = read([*SMALL, *BATCH, "--layout=auto", "--microbatches=auto"], "train")
    before = {"devices": "8"}, {"microbatches": "2"}
    settled(values, problems, lambda *_: Machine("v5e", 4), before=before, going_on=True)
    assert values.mesh_shape.size == 4 and values.layout.rules and values.microbatches == 2


@pytest.mark.slow
def test_on_other_devices_a_run_keeps_its_microbatches(capsys, tmp_path, searches):
    (tmp_path / "text.txt").write_bytes(b"A named dimension is a dimension with a name. " * 200)
    workdir = tmp_path / "run"
    job = ["train", *SMALL, *BATCH, f"--data={tmp_path}/text.txt", "--host_devices=8", "--steps=4"]
    job += [f"--workdir={workdir}", "--checkpoint_every=2", "--eval_batches=1"]
    first = "--mesh_shape=a:2", "--layout=batch:a", "--microbatches=auto"
    assert run([*job, *first, "--exit_at_step=2"]) == 75
    record = json.loads((workdir / "plan.json").read_text())
    record["found"]["microbatches"] = "2"  # as if memory had been scarce
    (workdir / "plan.json").write_text(json.dumps(record))
    second = "--mesh_shape=c:2", "--layout=auto", "--microbatches=auto"
    assert run([*job, *second, "--override"]) == 0
    printed = capsys.readouterr().out
    assert "mesh c:2" in printed and len(searches) == 2
    assert json.loads((workdir / "plan.json").read_text())["found"]["microbatches"] == "2"
