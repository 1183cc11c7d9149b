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


def test_training_alone_does_not_import_orbax():
    code = "import sys, meshdsl.training; sys.exit('orbax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
