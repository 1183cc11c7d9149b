"""`meshdsl names file.py:function`: the listing, and what it refuses."""

from pathlib import Path

import pytest

import meshdsl.cli
from meshdsl.cli.main import run

MODEL = """
import jax.numpy as jnp
import numpy as np

import meshdsl as md


def loss(x, w):
    hidden = jnp.tanh(x @ w)
    return hidden.sum()


def example():
    x, w = np.ones((2, 3), np.float32), np.ones((3, 5), np.float32)
    return md.from_jax(loss, names={"x": "batch embed"}), x, w


def nested():
    program, *arguments = example()
    return program, tuple(arguments)


def short():
    return example()[:2]


def other():
    return loss
"""


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return str(file)


def test_names_lists_lines_with_their_dims(model, capsys):
    assert run(["names", f"{model}:example"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("loss: ")
    assert "w  f32[embed=3, w_1?=5]" in text
    assert "hidden = jnp.tanh(x @ w)  f32[batch=2, w_1?=5]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which function: meshdsl names my_model.py:example"),
        (["{}:other"], "is not a function without arguments that returns a program"),
        (["{}:nested"], "The arguments are in a tuple: return them one by one"),
        (["{}:short"], "1 argument, but loss does not take these: missing a required"),
        (["{}:loss_"], "Did you mean `loss`?"),
    ],
)
def test_names_says_what_it_needs(model, capsys, arguments, message):
    assert run(["names", *(each.format(model) for each in arguments)]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text


def test_help_shows_the_function():
    page = (Path(meshdsl.cli.__file__).parent / "help_pages" / "names.txt").read_text()
    assert "return program, params, x" in page
