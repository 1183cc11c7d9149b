"""The house's manners: ruff and mypy are content, and CI runs the README's own test command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd=ROOT, **environment):
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_has_nothing_to_say():
    run("ruff", "check", "--no-cache", ".")


def test_ruff_would_format_nothing():
    run("ruff", "format", "--no-cache", "--check", ".")


def test_the_installed_package_type_checks(tmp_path):
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for part in ("meshdsl", "layouts", "lowering", "models"):
        shutil.copytree(ROOT / part, source / part)
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    install = ("install", "-q", "--no-deps", "--no-build-isolation", "--target", str(installed))
    run("pip", *install, str(source))
    assert (installed / "meshdsl" / "lowering" / "lower.py").exists()
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path))
    run("mypy", *options, "-p", "meshdsl", cwd=tmp_path, MYPYPATH=str(installed))


def test_ci_runs_the_test_command_of_the_readme():
    commands = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert commands[-1] in (ROOT / "README.md").read_text()
