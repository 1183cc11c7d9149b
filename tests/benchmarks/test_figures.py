"""`BENCHMARKS.md` is what the records and the notes give, and a record is of a real run."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.figures import __main__ as script
from tests.benchmarks.figures import page, records, table
from tests.benchmarks.figures.table import BENCHMARKS, ROOT, Benchmark

RECORDED = sorted(file.stem for file in records.MEASURED.glob("*.json"))


def test_the_page_is_what_records_and_notes_give():
    written = page.PAGE.read_text()
    assert written == page.text(), "write it anew: python -m tests.benchmarks.figures"


def test_records_and_notes_are_of_benchmarks_of_the_table():
    assert {*RECORDED} <= {*BENCHMARKS}
    notes = {file.stem for file in page.NOTES.glob("*.md")}
    assert notes <= {*BENCHMARKS, page.HELD_BY_TESTS}


@pytest.mark.parametrize("name", RECORDED)
def test_a_record_is_of_the_command_that_the_page_shows(name):
    record = records.read(name)
    assert record.commands == BENCHMARKS[name].commands, "run it anew"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.date)
    assert re.fullmatch(r"[0-9a-f]{9,}", record.commit)
    assert record.output


@pytest.mark.parametrize("name", RECORDED)
def test_the_commit_of_a_record_is_one_of_this_history(name):
    is_whole = ["git", "rev-parse", "--is-shallow-repository"]
    found = subprocess.run(is_whole, cwd=ROOT, capture_output=True, text=True)
    if found.stdout.strip() != "false":
        pytest.skip("there is no whole history here")
    line = ["git", "merge-base", "--is-ancestor", records.read(name).commit, "HEAD"]
    assert subprocess.run(line, cwd=ROOT, capture_output=True).returncode == 0


def test_every_benchmark_is_in_the_table():
    # Those that make files of the package, or read their arguments from other places, are not.
    makers = {"gpu_tables"}
    runs = {
        file.stem
        for file in Path(page.__file__).parents[1].glob("*.py")
        if re.search(r"^    parser = |^if __name__", file.read_text(), re.MULTILINE)
    }
    assert runs - makers == {name for name, one in BENCHMARKS.items() if one.sources}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_the_commands_run_is_there(name):
    for command in BENCHMARKS[name].commands:
        program, *words = command.split()
        if program == "python":
            assert words[0] == "-m"
            assert importlib.util.find_spec(words[1])
        else:
            assert program == "meshdsl"


@pytest.fixture
def one(monkeypatch, tmp_path):
    """A benchmark that prints a line, in a checkout without changes."""
    benchmark = Benchmark(
        "one", "One", "What one measures.", (f'{sys.executable} -c "print(1); print(2)"',), lines=1
    )
    monkeypatch.setattr(records, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(page, "NOTES", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "SECTIONS", {"Section": (benchmark,)})
    monkeypatch.setattr(script, "BENCHMARKS", {"one": benchmark})
    monkeypatch.setattr(records, "FOLDER", str(tmp_path / "folder"))
    (tmp_path / "held_by_tests.md").write_text("Tests hold this.\n")
    git = {"status": "", "rev-parse": "0123456789"}
    monkeypatch.setattr(records, "_git", lambda *arguments: git[arguments[0]])
    return benchmark, git


def test_a_run_is_recorded_and_shown(one, tmp_path, monkeypatch, capsys):
    assert page._NEVER_RUN in page.text()
    monkeypatch.setattr(sys, "argv", ["figures", "--run=one"])
    assert script.main() == 0
    record = records.read("one")
    assert record.output == "1\n2"
    assert record.commit == "0123456789"
    assert record.seconds >= 0
    written = (tmp_path / "page.md").read_text()
    assert written == page.text()
    assert "```text\n... (the first 1 lines are in the record)\n2\n```" in written
    assert f"*{record.date}, commit 0123456789" in written
    monkeypatch.setattr(sys, "argv", ["figures", "--list"])
    assert script.main() == 0
    assert record.date in capsys.readouterr().out


def test_a_benchmark_that_has_changed_since_its_run_says_so(one, monkeypatch):
    benchmark, _ = one
    records.measure(benchmark)
    assert page._CHANGED not in page.text()
    monkeypatch.setattr(page, "digest", lambda benchmark: "another")
    assert page._CHANGED in page.text()


def test_several_runs_are_recorded_in_a_real_checkout(tmp_path, monkeypatch):
    """What the first one writes is no change that the second one refuses."""
    root = tmp_path / "checkout"
    (root / "tests/benchmarks/figures/measured").mkdir(parents=True)
    (root / "BENCHMARKS.md").write_text("old")
    (root / ".gitignore").write_text("build/\n")
    (root / "code.py").write_text("x = 1")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for line in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*git, *line], cwd=root, check=True)
    left = root / "build/benchmarks/left"
    command = f"echo >> {left}; wc -l < {left}"
    table_of = {name: Benchmark(name, name, name, (command,)) for name in ("one", "two")}
    for module in (records, page):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(records, "MEASURED", root / "tests/benchmarks/figures/measured")
    monkeypatch.setattr(page, "SECTIONS", {"Section": (*table_of.values(),)})
    monkeypatch.setattr(page, "_note", lambda name: "")
    monkeypatch.setattr(script, "PAGE", root / "BENCHMARKS.md")
    monkeypatch.setattr(script, "BENCHMARKS", table_of)
    monkeypatch.setattr(sys, "argv", ["figures", "--run=all"])
    assert script.main() == 0
    assert [records.read(name).output for name in table_of] == ["1", "2"]
    subprocess.run([*git, "add", "-A"], cwd=root, check=True)
    subprocess.run([*git, "commit", "-qm", "Records"], cwd=root, check=True)
    assert script.main() == 0  # what another commit has left is gone
    assert [records.read(name).output for name in table_of] == ["1", "2"]
    (root / "code.py").write_text("x = 2")
    assert script.main() == 1


def test_a_digest_has_what_a_benchmark_imports(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    folder = tmp_path / "tests/benchmarks"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("from tests.benchmarks import two\n")
    (folder / "two.py").write_text("x = 1\n")
    benchmark = Benchmark("one", "One", "", ("python -m tests.benchmarks.one",))
    before = records.digest(benchmark)
    (folder / "two.py").write_text("x = 2\n")
    assert records.digest(benchmark) != before


def test_a_checkout_with_changes_is_refused(one):
    benchmark, git = one
    git["status"] = " M README.md"
    with pytest.raises(ValueError, match="commit first"):
        records.measure(benchmark)
    assert records.read("one") is None


def test_what_is_missing_or_fails_is_told_and_keeps_the_last_record(one, monkeypatch, capsys):
    benchmark, _ = one
    before = records.measure(benchmark)
    with pytest.raises(ValueError, match="one needs no_such_module, which is not here"):
        records.measure(dataclasses.replace(benchmark, needs=("no_such_module",)))
    failing = dataclasses.replace(benchmark, commands=("ls /no/such/folder",))
    monkeypatch.setattr(script, "BENCHMARKS", {"one": failing})
    monkeypatch.setattr(sys, "argv", ["figures", "--run=one"])
    assert script.main() == 1
    assert "ended with" in capsys.readouterr().err
    assert records.read("one") == before
    monkeypatch.setattr(sys, "argv", ["figures", "--run=two"])
    with pytest.raises(SystemExit):
        script.main()
    assert "unknown: two; there are one" in capsys.readouterr().err


def test_commands_name_no_folder_of_a_machine():
    for benchmark in BENCHMARKS.values():
        for command in benchmark.commands:
            assert "/tmp" not in command and "/home" not in command
    assert table.FOLDER.startswith("build/")
