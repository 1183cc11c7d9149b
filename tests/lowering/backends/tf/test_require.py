"""TensorFlow is asked for when it is needed, and told of in one line."""

import os
import subprocess
import sys

import pytest

import meshdsl as md
from meshdsl.cli.main import run
from meshdsl.lowering.backends.tf import require

MISSING = "backend 'tf' needs TensorFlow, which is not installed: pip install 'meshdsl[tf]'"


def test_a_missing_tensorflow_is_one_line(monkeypatch):
    monkeypatch.setattr(require, "version", lambda: None)
    with pytest.raises(ValueError) as error:
        require.tensorflow()
    assert str(error.value) == MISSING


@pytest.mark.parametrize("found", ["1.15.0", "2.9.3", "2.17.1"])
def test_a_tensorflow_that_is_too_old_is_reported(found, monkeypatch):
    monkeypatch.setattr(require, "version", lambda: found)
    with pytest.raises(ValueError) as error:
        require.tensorflow()
    assert str(error.value) == (
        f"backend 'tf' needs TensorFlow 2.18 or later, but {found} is installed: "
        "pip install 'meshdsl[tf]'"
    )


@pytest.mark.parametrize("found", ["2.18.0", "2.21.0", "3.0.0-rc1", "2.22.0.dev20261101"])
def test_versions_from_there_on_will_do(found, monkeypatch):
    monkeypatch.setattr(require, "version", lambda: found)
    require.tensorflow()


@pytest.mark.long
def test_nothing_else_imports_it():
    code = (
        "import sys, meshdsl.cli.train, meshdsl.cli.explain, meshdsl.models, meshdsl.lowering; "
        "import meshdsl as md; md.jit(lambda x: x, backend='jax'); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


@pytest.mark.long
def test_its_messages_about_its_build_and_missing_gpus_are_not_shown():
    code = (
        "import jax; from meshdsl.lowering.backends.tf.require import tensorflow; tensorflow(); "
        "import tensorflow as tf; tf.config.list_physical_devices(); tf.reduce_sum(tf.ones([2]))"
    )
    unset = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=unset, timeout=300, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_command_line_says_that_only_this_backend_takes_the_name_of_a_tpu(capsys):
    before = os.environ.get("TPU_NAME")
    assert run(["train", "--tpu=local"]) == 2
    told = capsys.readouterr().err
    assert "--tpu: only --backend=tf takes the name of a TPU; JAX finds its own" in told
    assert os.environ.get("TPU_NAME") == before  # later programs still run on hosts


def test_unknown_backends_are_reported_with_the_known_ones():
    with pytest.raises(ValueError, match="choose one of jax, jax_auto, tf, numpy"):
        md.jit(lambda x: x, backend="tensorflow")
