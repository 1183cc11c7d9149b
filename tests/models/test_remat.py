"""Rematerialisation by name: what is read, and what is refused."""

import pytest

from meshdsl import models
from meshdsl.models import remat


@pytest.mark.parametrize("text", ["none", "full", "dots", "keep_collectives", "names:x"])
def test_a_policy_is_read_as_it_is_written(text):
    assert remat.read(text) == text
    assert models.load("gpt_mini", f"remat={text}").config.remat == text


def test_names_may_be_separated_by_commas():
    assert remat.read("names:attention_out, mlp_hidden") == "names:attention_out+mlp_hidden"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dot",
            "unknown choice 'dot'; choose one of none, full, dots, keep_collectives, or names:... "
            "as in names:attention_out,mlp_hidden. Did you mean `dots`?",
        ),
        (
            "names:",
            "'names:': give names, of attention_query, attention_key, attention_value, "
            "attention_out, attention_added, mlp_gate, mlp_hidden, mlp_added or of your own",
        ),
    ],
)
def test_mistakes_are_told(text, message):
    with pytest.raises(ValueError) as error:
        remat.read(text)
    assert str(error.value) == message
    with pytest.raises(ValueError) as error:
        models.load("gpt_mini", f"remat={text}")
    assert message in str(error.value)
