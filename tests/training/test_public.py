"""The public names of training, each of which is imported when it is used."""

import subprocess
import sys

import pytest

from meshdsl import training


@pytest.mark.parametrize("name", training.__all__)
def test_public_names_are_what_they_say(name):
    assert getattr(training, name).__name__ == name


def test_other_names_are_missing_as_usual():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        training.trian  # noqa: B018


@pytest.mark.parametrize("slow", ["orbax", "scipy", "tensorflow", "meshdsl.imports.jax.function"])
def test_training_alone_does_not_import_what_takes_long(slow):
    code = f"import sys, meshdsl.training, meshdsl.cli.main; sys.exit({slow!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
