"""An operation without a partition rule is named with its line, and the file for the rule."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import partition

X = md.named(np.ones(4, np.float32), ["a"])


@pytest.mark.parametrize(
    ("name", "function", "file"),
    [
        ("cumsum", lambda x: md.cumsum(x, "a"), "cumulative"),
        ("sort", lambda x: md.sort(x, "a"), "sorting"),
        ("einsum", lambda x: md.einsum(x, x, over="a"), "einsum"),
    ],
)
def test_a_missing_rule_is_named_with_the_file_to_put_it_in(monkeypatch, name, function, file):
    monkeypatch.delitem(partition.RULES, name)
    with pytest.raises(ValueError) as caught:
        md.jit(function, "m:2", "a:m").lower(X)
    text = str(caught.value)
    assert f"operation `{name}` has no partition rule, which tests/lowering/partition/" in text
    assert f"add it to RULES in lowering/partition/{file}.py" in text
