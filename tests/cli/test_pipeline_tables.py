"""`meshdsl explain --pipeline_table`: tables of schedules, printed, written and run again."""

import pytest

from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.named import NAMES, WITH_ROUNDS, named
from tests.cli.commands import explained, refused

SIZES = ["--mesh_shape=pipe:2", "--microbatches=4"]


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_printed_and_written(name, capsys, tmp_path):
    file = tmp_path / "mine.csv"
    rounds = 2 if name in WITH_ROUNDS else None
    given = ["--pipeline_rounds=2"] if rounds else []
    text = explained(capsys, f"--pipeline={name}", *SIZES, *given, f"--pipeline_table={file}")
    schedule = named(name, 2, 4, rounds)
    assert text.startswith(f"{name}: 2 stages, {schedule.chunks} chunks, 4 microbatches; bubble")
    assert text.endswith(f"{file} is written: --pipeline={file} runs it\n")
    read = csv_files.read(file)
    assert read.without_messages().rows == schedule.without_empty_cells().rows
    assert read.has_messages
    again = explained(capsys, f"--pipeline={file}", "--pipeline_table=-")
    assert again.splitlines()[1:] == text.splitlines()[1:-1]


def test_a_table_that_was_written_runs(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    how = ["--pipeline=1f1b", *SIZES, "--layout=layers:pipe"]
    explained(capsys, *how, f"--pipeline_table={file}")
    model = ["--model=gpt_mini", "--model_args=layers=2", "--length=8"]
    own = explained(capsys, *model, *how[1:], f"--pipeline={file}")
    assert f"schedule {file}" in own
    usual = explained(capsys, *model, *how)
    grid = [line for line in usual.splitlines() if line.startswith("  stage ")]
    assert grid and grid == [line for line in own.splitlines() if line.startswith("  stage ")]


@pytest.mark.long
def test_a_table_of_two_rounds_runs_without_saying_so(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    text = explained(capsys, "--pipeline=interleaved", *SIZES, f"--pipeline_table={file}")
    assert text.startswith("interleaved: 2 stages, 4 chunks")  # two rounds, if none are given
    how = [
        "--model=gpt_mini",
        "--model_args=layers=4",
        "--length=8",
        *SIZES,
        "--layout=layers:pipe",
    ]
    own = explained(capsys, *how, f"--pipeline={file}")
    usual = explained(capsys, *how, "--pipeline=interleaved")
    assert "2 stages of 2 chunks" in own and "2 stages of 2 chunks" in usual


@pytest.mark.parametrize("repeat", ["0F0,0SEND_F0,0F0", "0F0,0F0,0SEND_F0"])
def test_an_action_that_is_there_twice_is_told_as_such(capsys, tmp_path, repeat):
    file = tmp_path / "mine.csv"
    file.write_text(f"{repeat},0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    text = refused(capsys, f"--pipeline={file}", "--pipeline_table=-")
    assert "`0F0` is already in stage 0, column 1. Remove one" in text


def test_the_layout_tells_the_axis_of_the_stages(capsys):
    how = ["--mesh_shape=data:2,pipe:4", "--microbatches=4", "--pipeline_table=-"]
    text = explained(capsys, *how, "--layout=layers:pipe; batch:data")
    assert text.startswith("circular: 4 stages, 4 chunks")
    assert "which axis of the mesh are the stages along? Give --layout=layers:pipe" in refused(
        capsys, *how
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipeline_table=x.txt", *SIZES], "x.txt is no name of a table: give one that ends in"),
        (["--pipeline_table=-"], "needs the number of stages: give --mesh_shape=pipe:4"),
        (["--pipeline_table=-", SIZES[0]], "--pipeline_table needs the number of --microbatches"),
        (["--pipeline_table=-", *SIZES, "--pipeline=none"], "--pipeline=none has no table"),
        (["--pipeline_table=-", *SIZES, "--pipeline=gpip"], "Did you mean `gpipe`?"),
        (["--pipeline_table=-", *SIZES, "--decode"], "prints a table alone: leave out --decode\n"),
        (
            ["--pipeline_table=-", *SIZES, "--only=mlp", "--json", "--mtbf=1h"],
            "prints a table alone: leave out --only and --json and --mtbf\n",
        ),
        (["--pipeline_table=/proc/x.csv", *SIZES], "--pipeline_table: cannot write /proc/x.csv:"),
        (["--pipeline_table=-", "--microbatches=4", "--mesh_shape=pipe4"], "--mesh_shape: "),
        (["--pipeline_table=-", *SIZES, "--layout=layers:stage"], "its axes are pipe"),
        (["--pipeline_table=-", *SIZES, "--layout=layers:-"], "gives the layers no axes of mesh"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert message in refused(capsys, *arguments)


def test_a_wrong_table_names_its_first_wrong_action(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    text = refused(capsys, f"--pipeline={file}", "--pipeline_table=-")
    assert f"--pipeline: schedule `{file}` is wrong at stage 0, column 4, `0B1`: it is mis" in text


def test_a_table_is_written_to_a_folder_that_is_there(capsys, tmp_path):
    file = tmp_path / "tables" / "mine.csv"
    text = refused(capsys, *SIZES, f"--pipeline_table={file}")
    assert f"--pipeline_table: cannot write {file}: No such file or directory" in text
    assert not file.parent.exists()


def test_a_table_says_how_a_file_writes_its_actions(capsys):
    says = "in a CSV file, the number of the chunk goes in front: 0F3"
    assert says in explained(capsys, *SIZES, "--pipeline_table=-")
    assert says not in explained(capsys, *SIZES, "--pipeline=zbv", "--pipeline_table=-")


def test_sizes_beside_a_table_are_those_of_the_table(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    how = [f"--pipeline={file}", "--pipeline_table=-"]
    right = ["--mesh_shape=pipe:2", "--microbatches=2", "--pipeline_rounds=1"]
    assert explained(capsys, *how, *right) == explained(capsys, *how)
    text = refused(capsys, *how, "--mesh_shape=pipe:4", "--microbatches=8", "--pipeline_rounds=2")
    assert f"--microbatches=8: {file} has 2. Leave it out" in text
    assert "pipe4" in refused(capsys, *how, "--mesh_shape=pipe4")
    assert f"--pipeline_rounds=2: {file} has 1. Leave it out" in text
    assert f"--mesh_shape=pipe:4 has 4 stages, and {file} has 2. Leave it out" in text


def test_a_table_that_cannot_be_run_is_written_and_told(capsys, tmp_path):
    ours, file = tmp_path / "ours.csv", tmp_path / "again.csv"
    ours.write_text("1F0,1B0\n0F0,0B0\n")  # a stage sends to the one before
    text = explained(capsys, f"--pipeline={ours}", f"--pipeline_table={file}")
    use = "--pipeline_table=- checks it; it cannot be run"
    assert text.endswith(f"{file} is written: --pipeline={file} {use}\n")
