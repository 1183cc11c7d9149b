"""A wrong instruction is found, and shrunk to a program of one operation that shows it."""

from types import SimpleNamespace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering.backends.numpy import EMITTERS
from meshdsl.lowering.options import Options
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


def test_paths_and_options_that_matter_are_in_the_python_too(monkeypatch):
    """What is wrong shows only because `params` live elsewhere than they are used."""
    right = EMITTERS["all_gather"]

    def wrong(machine, instruction, inputs):
        return [array + 1.0 for array in right(machine, instruction, inputs)]

    def function(inputs):
        return {"result": md.tanh(md.sin(inputs["params"]["w"])), "other": inputs["x"] * 2}

    a = md.Dimension("a", 4)
    inputs = {
        "params": {"w": md.named(np.arange(4.0), [a])},
        "x": md.named(np.arange(4.0), ["b"]),
    }
    graph = md.jit(function).trace(inputs)
    layout = md.Layout.parse("params/a:m0; b:m1")
    mesh = md.Mesh.parse("m0:2,m1:2")
    case = SimpleNamespace(graph=graph, inputs=inputs, mesh=mesh, layout=layout)
    monkeypatch.setitem(EMITTERS, "all_gather", wrong)
    found = minimal.failure(case, "numpy", Options(bucket_bytes=0, weights="keep"))
    assert found.holds()
    smallest = minimal.minimise(found)
    assert (str(smallest.layout), str(smallest.mesh)) == ("params/a:m0", "m0:2")
    assert smallest.options == Options()
    script = minimal.as_python(smallest)
    assert '"0 inputs/params/w": md.named(' in script
    with pytest.raises(AssertionError, match=r"Mismatched elements|Not equal"):
        exec(script, {})
    monkeypatch.setitem(EMITTERS, "all_gather", right)
    exec(script, {})


def test_python_of_an_operation_without_optional_operands_runs():
    """The parameter that lists these is an empty tuple."""
    length, memory, kv = md.dims(length=3, memory_length=4, kv=2)

    def function(inputs):
        return md.attention(inputs["q"], inputs["k"], md.sin(inputs["k"]))

    inputs = {
        "q": md.named(np.ones((3, 2)), [length, kv]),
        "k": md.named(np.ones((4, 2)), [memory, kv]),
    }
    graph = md.jit(function).trace(inputs)
    case = SimpleNamespace(
        graph=graph, inputs=inputs, mesh=md.Mesh.parse("m0:2"), layout=md.Layout.parse("length:m0")
    )
    script = minimal.as_python(minimal.failure(case, "numpy"))
    assert "given=()" in script
    exec(script, {})
