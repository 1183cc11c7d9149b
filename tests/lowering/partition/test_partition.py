"""An operation without a partition rule is named with its line, and the file for the rule."""

from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import partition
from meshdsl.lowering.partition import rule_of
from meshdsl.lowering.writing import bodies
from meshdsl.tracing.graph import Graph, Operation, Primitive
from tests.test_house import LOWERING_ALONE, ROOT, primitives

FILES = {name: family for family in partition.FAMILIES for name in family.RULES}
BODIES = "BODIES in lowering/writing/bodies.py needs it"
X = md.named(np.ones(4, np.float32), ["a"])


def test_the_files_have_all_rules():
    assert FILES.keys() == partition.RULES.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_missing_rule_is_named_with_the_file_to_put_it_in(monkeypatch, name):
    monkeypatch.delitem(partition.RULES, name)
    with pytest.raises(ValueError) as caught:
        rule_of(Operation((primitives() | LOWERING_ALONE)[name], (), ()))
    file = Path(FILES[name].__file__).resolve().relative_to(ROOT)
    assert f"operation `{name}` has no partition rule, which " in str(caught.value)
    assert f": add it to RULES in {file} (ARCHITECTURE.md, How to add)" in str(caught.value)


def test_the_first_rule_of_a_family_is_named_with_the_file_to_make():
    first = Primitive("first", lambda inputs, params: [])  # of this module: no family is called so
    file = "lowering/partition/test_partition.py"
    with pytest.raises(ValueError, match=f"RULES in {file}, and the file to FAMILIES in lowering/"):
        rule_of(Operation(first, (), ()))


@pytest.mark.parametrize("name", sorted(bodies.BODIES))
def test_an_operation_with_bodies_is_named_with_the_table_for_it(name):
    body = Graph((), (), ())
    with pytest.raises(ValueError, match=f"operation `{name}` has no partition rule.*: {BODIES}"):
        rule_of(Operation(primitives()[name], (), (), {"body": body}))


def test_a_missing_rule_is_named_with_the_line_that_needs_it(monkeypatch):
    monkeypatch.delitem(partition.RULES, "cumsum")
    with pytest.raises(ValueError, match=r"which tests/lowering/partition/test_partition\.py:"):
        md.jit(lambda x: md.cumsum(x, "a"), "m:2", "a:m").lower(X)
