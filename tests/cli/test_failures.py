"""`meshdsl explain --failures` and `--mtbf`: who holds the state, and what failures cost."""

import json

import pytest

from meshdsl.cli.parsing.readers import duration, minutes
from tests.cli.commands import explained, refused

TWICE = ("--mesh_shape=replica:2,data:8", "--layout=batch:replica+data; optimizer/embed:data")
ONCE = ("--mesh_shape=data:8", "--layout=batch:data; optimizer/embed:data")


def test_each_state_has_its_holders(capsys):
    lines = explained(capsys, *TWICE, "--failures").splitlines()
    assert lines[0] == (
        "train_step on replica:2 data:8: 16 devices on 4 hosts; a host has 4 consecutive devices"
    )
    rows = {line.split()[0]: line.split() for line in lines[2:] if line.startswith("  ")}
    assert rows["params"][1:7] == ["10", "not", "split", "replica+data", "1", "16"]
    assert rows["optimizer/mean"][1:7] == ["10", "embed:data", "replica", "8", "2", "2"]
    assert rows["optimizer/mean_square"][-6:] == ["any", "1;", "4", "of", "6", "pairs"]
    assert {"step", "skipped", "random", "position"} <= rows.keys()
    assert (
        "without a checkpoint, the state survives the loss of any host, and of 4 of the 6 pairs of "
        "hosts (66.7 %)" in lines
    )
    assert not any("single host" in line for line in lines)
    assert all(len(line) <= 120 for line in lines)


def test_the_flags_of_a_run_may_say_how_often_it_saves(capsys, tmp_path):
    (tmp_path / "run.toml").write_text('checkpoint_every = 500\nworkdir = "runs/long"\n')
    config = f"--config={tmp_path / 'run.toml'}"
    expected = explained(capsys, *TWICE, "--failures")
    assert explained(capsys, *TWICE, "--failures", config) == expected


def test_a_single_holder_is_named_with_what_changes_it(capsys):
    text = " ".join(explained(capsys, *ONCE, "--failures").split())
    assert "survives the loss of no host" in text
    assert "held by a single host: optimizer/mean (embed:data), optimizer/mean_square" in text
    assert "`replica:2` as the first axis of the mesh" in text


def test_a_usual_report_has_no_word_of_it(capsys):
    assert "single host" not in explained(capsys, *ONCE)


def test_hosts_are_those_of_the_hardware_or_as_given(capsys):
    assert "2 hosts; a host has 8" in explained(capsys, *TWICE, "--failures", "--hardware=h100")
    given = explained(capsys, *TWICE, "--failures", "--devices_per_host=2")
    assert "8 hosts; a host has 2" in given
    one = explained(capsys, *TWICE, "--failures", "--devices_per_host=64")
    assert "16 devices on 1 host; a host has 16" in one and "there is one" in one


def test_goodput_is_predicted_from_checkpoints_and_from_other_hosts(capsys):
    text = explained(capsys, *TWICE, "--mtbf=50000h", "--checkpoint_every=100")
    for words in (
        "one in 50,000 h of a host is 0.00192 per day for 4 hosts, one in 12,500 h",
        "by Young, by Daly",
        "useful, --checkpoint_every=100",
        "steps taken again",
        "with --host_copies from copies in the hosts' memory, else from checkpoints",
    ):
        assert words in " ".join(text.split())
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "every host holds what no other does" in explained(capsys, *ONCE, "--mtbf=50000h")


def test_the_time_between_failures_may_be_that_of_the_job(capsys):
    of_host = explained(capsys, *TWICE, "--mtbf=48h", "--devices_per_host=2")
    assert explained(capsys, *TWICE, "--job_mtbf=6h", "--devices_per_host=2") == of_host
    assert "for 8 hosts, one in 6 h" in " ".join(of_host.split())


def test_a_short_time_between_failures_is_said_in_its_unit(capsys):
    text = explained(capsys, *TWICE, "--mtbf=30min")
    assert "one in 30 min 0 s of a host is 192 per day for 4 hosts, one in 7 min 30 s" in text


@pytest.mark.parametrize("flag", ["--storage_bandwidth=1", "--checkpoint_every=2000000000"])
def test_a_job_that_never_completes_a_checkpoint_has_no_useful_steps(capsys, flag):
    values = json.loads(explained(capsys, *TWICE, "--mtbf=1h", "--json", flag))
    way = values["goodput"]["from_checkpoints"]
    assert (way["shares_as_given"] or way["shares"])["useful"] == 0.0


def test_a_slower_storage_and_a_longer_restart_cost_more(capsys):
    def useful(*arguments):
        values = json.loads(explained(capsys, *TWICE, "--mtbf=1h", "--json", *arguments))
        return values["goodput"]["from_checkpoints"]["shares"]["useful"]

    usual = useful()
    assert useful("--storage_bandwidth=100kB") < usual
    assert useful("--restart_time=20min") < usual


def test_values_are_written_as_json(capsys):
    values = json.loads(explained(capsys, *TWICE, "--failures", "--json"))
    assert (values["hosts"], values["survives"]["pairs"]) == (4, 4)
    assert values["held_by_a_single_host"] == [] and values["goodput"] is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--mtbf=often"], "--mtbf: needs a time, as 50000h or 5min (units: s, min, h, d, y)"),
        (["--mtbf=1h", "--job_mtbf=1h"], "--mtbf is of one host, --job_mtbf of the whole job"),
        (["--job_mtbf=6"], "--job_mtbf: needs a time, as 50000h"),
        (["--mtbf=0h"], "--mtbf: needs a time, as 50000h"),
        (["--mtbf=50000"], "--mtbf: needs a time, as 50000h"),
        (["--devices_per_host=4"], "--devices_per_host is for --failures, --mtbf or --job_mtbf"),
        (["--failures", "--devices_per_host=0"], "needs a whole number of at least 1"),
        (
            ["--failures", "--restart_time=1min"],
            "--restart_time is for --mtbf or --job_mtbf: give",
        ),
        (["--mtbf=1h", "--storage_bandwidth=0"], "--storage_bandwidth must be above 0"),
        (["--failures", "--html=x.html", "--stage=placed"], "leave out --html and --stage"),
        (["--failures", "--only=mlp"], "leave out --only"),
        (["--mtbf=1h", "--only=mlp"], "leave out --only"),
        (["--job_mtbf=1h", "--only=mlp"], "leave out --only"),
        (["--pipeline_table=-", "--only=mlp"], "--pipeline_table prints a table alone: leave out"),
    ],
)
def test_bad_input_is_told(capsys, arguments, problem):
    assert problem in refused(capsys, *arguments)


def test_durations_are_read_in_their_units():
    units = {"90s": 90, "5min": 300, "1.5 h": 5400, "30d": 30 * 86_400, "50,000h": 180_000_000}
    assert {text: duration(text) for text in units} == units
    assert duration("1y") == 365 * 86_400
    assert [minutes(text) for text in ("10", "0.5", "10min", "90s", "2h")] == [
        10,
        0.5,
        10,
        1.5,
        120,
    ]
