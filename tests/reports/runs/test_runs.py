"""Runs beside each other: what is read of their folders, their order, and their curves."""

import io
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from meshdsl.cli.main import run
from meshdsl.reports.runs.curves import draw, panels_of
from meshdsl.reports.runs.reading import runs_below
from meshdsl.reports.runs.table import as_json, as_table, differences, ranked, settings_table
from meshdsl.training.reporting.metrics import MetricsWriter
from tests.reports.fitting import misfits

DEFAULTS = {"learning_rate": "0.001", "steps": "200", "clip_norm": None}


def written(folder, losses, settings=None, held_out=None):
    """Writes a run as `train` does; returns its folder."""
    with MetricsWriter(folder, settings=settings) as writer:
        for number, loss in enumerate(losses, 1):
            last = number == len(losses)
            writer.write(number * 10, {"loss": loss, "eval_loss": held_out if last else None})
    return folder


@pytest.fixture
def two(tmp_path):
    first = 'steps = 30\nlearning_rate = "3e-4"\nworkdir = "first"\nlayout = "batch:data"\n'
    written(tmp_path / "runs" / "first", [3.0, 2.0, 1.5], first, 1.75)
    second = 'workdir = "second"\nsteps = 30\nlayout = "batch:data"\n'
    written(tmp_path / "runs" / "deep" / "second", [2.5, float("nan")], second, 1.25)
    return tmp_path / "runs"


def test_runs_are_found_below_a_folder_and_the_best_comes_first(two):
    runs = runs_below([str(two)])
    assert [r.name for r in runs] == [f"{two}/deep/second", f"{two}/first"]
    assert [r.name for r in ranked(reversed(runs))] == [f"{two}/deep/second", f"{two}/first"]
    second, first = runs
    assert (first.step, first.last("loss"), first.last("eval_loss")) == (30, 1.5, 1.75)
    assert first.curve("loss") == ([10, 20, 30], [3.0, 2.0, 1.5])
    assert math.isnan(second.last("loss"))
    assert [r.name for r in runs_below([str(two / "first"), str(two)])] == [r.name for r in runs]


def test_the_settings_that_differ_take_defaults_for_those_not_given(two):
    runs = runs_below([str(two)])
    assert differences(runs, DEFAULTS) == {"learning_rate": ["0.001", "3e-4"]}
    assert differences(runs, {**DEFAULTS, "learning_rate": "0.000_3"}) == {}  # the same number
    (two / "first" / "run.toml").unlink()
    assert differences(runs_below([str(two)]), DEFAULTS) == {}


def test_a_setting_is_a_row_and_what_launch_made_is_none(two):
    for name, more in (("first", 'clip_norm = 1.0\ncoordinator = "localhost:1"\n'), ("third", "")):
        written(two / name, [1.0], f"steps = 30\nprocess_id = 0\n{more}")
    (two / "deep" / "second" / "run.toml").unlink()
    places = [str(two / name) for name in ("first", "third", "deep")]
    runs = [run for run in runs_below(places) if "(1)" not in run.name]
    table = settings_table(runs, DEFAULTS)
    assert _cells(table) == [[Text(t)] for t in ("clip_norm", "unknown", "1.0", "none")]
    assert settings_table(runs[1:2], DEFAULTS) is None


@pytest.mark.parametrize("more", [0, 12])
def test_many_runs_are_all_shown_on_a_narrow_terminal(tmp_path, more):
    """Each run is shown, with the value that is its own, also with many settings that differ."""
    for number in range(30):
        others = "".join(f"setting_{n} = {number * 100 + n}\n" for n in range(more))
        written(tmp_path / f"r{number:02}", [1.0], f"batch_size = {1000 + number}\n{others}")
    runs = [replace(one, name=f"runs/{one.name[-3:]}") for one in runs_below([str(tmp_path)])]
    console = Console(width=80, file=io.StringIO())
    console.print(settings_table(runs, DEFAULTS, console.width))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    places = [n for n, line in enumerate(lines) if line.startswith("runs/")]
    shown = [" ".join(lines[a:b]) for a, b in itertools.pairwise([*places, len(lines)])]
    for number, text in enumerate(shown):
        assert text.startswith(f"runs/r{number:02} ") and str(1000 + number) in text
        assert all(str(number * 100 + n) in text for n in range(more))
    assert len(shown) == 30


def test_few_runs_have_a_column_each_where_these_fit(two):
    runs = [replace(one, name=name) for one, name in zip(runs_below([str(two)]), "ab", strict=True)]
    assert [str(c.header) for c in settings_table(runs, DEFAULTS, 80).columns][1:] == ["a", "b"]
    wide = settings_table([replace(one, name=one.name * 40) for one in runs], DEFAULTS, 80)
    assert [str(c.header) for c in wide.columns][1:] == ["a" * 40, "b" * 40]  # folded
    narrow = settings_table(runs, DEFAULTS, 25)
    assert [str(c.header) for c in narrow.columns] == ["run", "learning_rate"]


def test_json_has_every_setting(two):
    read = json.loads(as_json(runs_below([str(two)]), DEFAULTS))
    assert read["differing_settings"] == ["learning_rate"]
    assert [one["held_out_loss"] for one in read["runs"]] == [1.25, 1.75]
    assert read["runs"][0]["last_report"]["loss"] == "NaN"
    assert read["runs"][1]["settings"]["learning_rate"] == "3e-4"


def test_an_earlier_run_in_the_same_folder_keeps_its_settings(two):
    written(two / "first", [1.0], "steps = 99\n")
    again, earlier = runs_below([str(two / "first")])
    assert (again.name, earlier.name) == (f"{two}/first", f"{two}/first (1)")
    assert (again.settings["steps"], earlier.settings["steps"]) == ("99", "30")
    assert (again.step, earlier.step) == (10, 30)


def test_the_speed_is_the_median_of_the_reports(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        for number, speed in enumerate([10.0, 1000.0, 1200.0, None, 1100.0, 300.0], 1):
            writer.write(number * 10, {"loss": 1.0, "tokens_per_second": speed})
    written(tmp_path / "without", [1.0])
    runs = runs_below([str(tmp_path)])
    assert [run.median("tokens_per_second") for run in runs] == [1000.0, None]
    (column,) = [c for c in as_table(runs, DEFAULTS).columns if c.header == "tokens/s"]
    assert [*column.cells] == ["1,000", ""]
    read = json.loads(as_json(runs, DEFAULTS))["runs"]
    assert [one["median_tokens_per_second"] for one in read] == [1000.0, None]


def test_a_run_in_the_folder_of_another_is_found_but_not_among_its_checkpoints(two):
    inner = written(two / "first" / "inner", [1.0])
    written(two / "first" / "checkpoints" / "5", [1.0])
    assert [run.name for run in runs_below([str(two / "first")])] == [
        str(two / "first"),
        str(inner),
    ]


def test_a_run_without_settings_does_not_keep_those_of_a_command(two):
    with MetricsWriter(two / "first", begun=30) as writer:
        writer.write(40, {"loss": 1.0})
    (first,) = runs_below([str(two / "first")])
    assert (first.step, first.settings) == (40, None)


def test_numbers_are_read_as_flags_are(two):
    settings = 'steps = "1,000"\nlearning_rate = "3e-4"\nlayout = "batch:data"\n'
    written(two / "third", [1.0], settings)
    runs = runs_below([str(two / "third")])
    assert _cells(as_table(runs, DEFAULTS))[1] == ["10/1,000"]
    (two / "first" / "run.toml").write_text(settings.replace("1,000", "1000"))
    runs = runs_below([str(two / "first"), str(two / "third")])
    assert differences(runs, DEFAULTS) == {}


def _cells(table):
    return [list(column.cells) for column in table.columns]


def test_lines_that_are_no_reports_are_told(two):
    with (two / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 1.0}\n{"step": 40, "lo')
    with pytest.warns(UserWarning, match=r"2 lines of .*first/metrics.jsonl are no reports"):
        (first,) = runs_below([str(two / "first")])
    assert first.step == 30


def test_settings_that_cannot_be_read_are_told(two):
    (two / "first" / "run.toml").write_text("steps = \n")
    with pytest.warns(UserWarning, match=r"first/run.toml cannot be read: Invalid value"):
        (first,) = runs_below([str(two / "first")])
    assert first.settings is None


@pytest.mark.parametrize("end", [".svg", ".png", ".pdf", ".html"])
def test_the_same_runs_make_the_same_file(two, tmp_path, end):
    runs = runs_below([str(two)])
    files = [tmp_path / f"{name}{end}" for name in ("one", "two")]
    for file in files:
        draw(runs, file)
    one, other = (file.read_bytes() for file in files)
    assert one == other and len(one) > 5_000


def test_a_picture_has_a_panel_for_each_reported_metric(two, tmp_path):
    runs = runs_below([str(two)])
    assert panels_of(runs) == ["loss"]
    extra = written(two / "third", [1.0])
    with MetricsWriter(extra, begun=10) as writer:
        writer.write(
            20,
            {"loss": 1.0, "mfu": 0.5, "dropped_choices": 0.25, "skipped_steps": 0.0}
            | {"steps_share": 0.75, "saving_share": 0.25},
        )
    runs = runs_below([str(two)])
    assert panels_of(runs) == ["loss", "mfu", "steps_share", "dropped_choices"]
    draw(runs, tmp_path / "curves.svg")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "curves.svg").read_text())
    assert {"loss (nats); held out: ●", "model FLOPs utilisation", "dropped choices"} <= {*words}
    assert {run.name for run in runs} <= {*words}


def test_what_is_zero_everywhere_has_no_panel_and_steps_are_whole(two, tmp_path):
    with MetricsWriter(two / "third") as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0 / step, "dropped_choices": 0.0, "found": step - 1.0})
    runs = runs_below([str(two / "third")])
    assert panels_of(runs) == ["loss", "found"]
    draw(runs, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    steps = [re.findall(r">([\d.]+)</text>", tick) for tick in text.split('id="xtick_')[1:]]
    assert {"1", "2", "3"} <= {label for labels in steps for label in labels[:1]}
    assert not any("." in label for labels in steps for label in labels[:1])


def test_a_page_needs_no_network(two, tmp_path):
    draw(runs_below([str(two)]), tmp_path / "curves.html")
    page = (tmp_path / "curves.html").read_text()
    assert "<svg role=" in page and not re.search(r"(src|href)=.https?://", page)


@pytest.mark.parametrize("width", [420, 1300])
def test_all_panels_of_a_page_can_be_seen(two, tmp_path, chromium, width):
    extra = written(two / "third", [1.0])
    with MetricsWriter(extra, begun=10) as writer:
        writer.write(20, {"loss": 1.0, "mfu": 0.5, "dropped_choices": 0.25})
    runs = runs_below([str(two)])
    draw(runs, tmp_path / "curves.html")
    chromium.open(tmp_path / "curves.html")
    chromium.screen(width)
    assert misfits(chromium) == []
    names = chromium.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].map((one) => one.ariaLabel)"
    )
    words = ["loss (nats)", "model FLOPs utilisation", "dropped choices"]
    assert names == [f"{one}, over steps" for one in words]
    ids = chromium.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    legend = chromium.evaluate("[...document.querySelectorAll('li')].map(li => li.textContent)")
    assert legend == [run.name for run in runs]


def test_the_commands(two, tmp_path, capsys):
    assert run(["runs", str(two)]) == 0
    head, second, first, empty, names, rates = capsys.readouterr().out.splitlines()
    assert head.split() == "run step loss held-out tokens/s".split()
    assert second.split()[1:] == ["20/30", "nan", "1.2500"]
    assert first.split()[1:] == ["30/30", "1.5000", "1.7500"]
    assert (empty, rates.split()) == ("", ["learning_rate", "1e-3", "3e-4"])
    assert names.split() == [*"settings that differ".split(), second.split()[0], first.split()[0]]
    assert run(["runs", "--json", str(two)]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    assert run(["plot", f"--out={tmp_path}/curves.svg", str(two / "first")]) == 0
    assert capsys.readouterr().out == f"1 run drawn in {tmp_path}/curves.svg\n"
    assert run(["plot", f"--out={tmp_path}/curves.svg", f"--workdir={two / 'first'}"]) == 0
    assert capsys.readouterr().out == f"1 run drawn in {tmp_path}/curves.svg\n"
    assert run(["runs", "--json", f"--workdir={two / 'first'}"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs"], "say whose runs to list: meshdsl runs runs/first runs/second"),
        (["runs", "{}/runs/frist"], "is not a folder. Did you mean `first`?"),
        (["runs", "{}/empty"], "has no run: no folder in it has a metrics.jsonl with reports"),
        (["plot", "{}/runs"], "--out says where to draw, as in --out=curves.svg"),
        (["plot", "{}/runs", "--out=curves.jpg"], "curves.jpg must end in .svg, .png, .pdf, .html"),
        (["plot", "{}/runs", "--out={}/none/c.svg"], "c.svg: No such file or directory"),
        (["plot", "{}/runs", "--ouf=c.svg"], "unknown flag --ouf"),
        (["plot", "{}/bare", "--out={}/c.svg"], "nothing to draw: no metric in {}/bare"),
    ],
)
def test_mistakes(two, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run([argument.format(tmp_path) for argument in arguments]) == 2
    assert message.format(tmp_path) in capsys.readouterr().err
