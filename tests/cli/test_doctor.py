"""`meshdsl doctor` and `meshdsl --version`: what is installed, and what is missing for what."""

import jax
import numpy as np
import pytest

from meshdsl import __version__
from meshdsl.cli import doctor
from meshdsl.cli.main import run


def test_the_versions_are_in_one_line(capsys):
    assert run(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"meshdsl {__version__} (jax {jax.__version__}, Python 3.")


def test_what_there_is_is_shown(capsys):
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"numpy {np.__version__}" in text
    assert "\n  8 × cpu (cpu)\n" in text
    assert all(use.what in text for use in doctor.USES)


def test_what_is_missing_is_named_with_what_installs_it():
    installed = {"jax": "0.10.2", "pyarrow": "26.0"}
    text = doctor.table(installed)
    (line,) = [line for line in text.splitlines() if line.startswith("--tokenizer")]
    assert "no " in line and "tokenizers missing: pip install -e '.[data]'" in line
    assert "tensorflow or tensorflow-cpu missing: pip install -e '.[tf]'" in text
    assert "yes" not in text


def test_a_package_without_which_nothing_works_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "versions", lambda: {"jax": "0.10.2"})
    assert run(["doctor"]) == 1
    assert "jaxlib, numpy, absl-py, rich missing: pip install -e ." in capsys.readouterr().out


def test_devices_that_do_not_start_are_told(monkeypatch):
    def fails():
        raise RuntimeError("Unable to initialize backend 'tpu'\nand more")

    monkeypatch.setattr(jax, "devices", fails)
    assert list(doctor._devices())[1] == "  JAX finds none: Unable to initialize backend 'tpu'"


@pytest.mark.parametrize(
    ("platforms", "reason"), [("cpu", "JAX_PLATFORMS=cpu leaves it out"), ("", "pip install -e")]
)
def test_an_accelerator_that_jax_leaves_out_is_told(monkeypatch, tmp_path, platforms, reason):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    (tmp_path / "nvidia0").touch()
    files = {"gpu": (str(tmp_path / "nvidia0"),), "tpu": (str(tmp_path / "accel0"),)}
    (line,) = doctor._unused({"cpu"}, files)
    assert line.startswith("  a GPU is here") and reason in line
    assert not list(doctor._unused({"gpu"}, files))
