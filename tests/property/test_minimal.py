"""A wrong instruction is found, and shrunk to a program of one operation that shows it."""

import numpy as np
import pytest

from meshdsl.lowering.backends.numpy import EMITTERS
from tests.property import minimal
from tests.property.programs import make_case


def test_a_failure_shrinks_to_python_that_fails(monkeypatch):
    right = EMITTERS["sum"]

    def wrong_on_several_devices(machine, instruction, inputs):
        found = right(machine, instruction, inputs)
        return found + np.ones((), found.dtype) if machine.mesh.size > 1 else found

    monkeypatch.setitem(EMITTERS, "sum", wrong_on_several_devices)
    found = next(
        found for n in range(20) if (found := minimal.failure(make_case(n), "numpy")).holds()
    )
    smallest = minimal.minimise(found)
    assert [op.name for op in smallest.graph.operations] == ["sum"]
    assert not smallest.layout.rules and len(smallest.mesh.axes) == 1
    script = minimal.as_python(smallest)
    assert 'op("sum"' in script
    with pytest.raises(AssertionError, match=r"Mismatched elements|Not equal"):
        exec(script, {})
    monkeypatch.setitem(EMITTERS, "sum", right)
    exec(script, {})
