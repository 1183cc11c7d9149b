"""A backend without a line for an instruction says which, for what line, and where it goes."""

import re
from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import backends
from meshdsl.lowering.backends import missing
from meshdsl.lowering.backends.jax import collectives as of_jax
from meshdsl.lowering.backends.missing import emitter_of
from meshdsl.lowering.backends.tf import collectives as of_tf
from meshdsl.lowering.collectives import COLLECTIVES

X = md.named(np.ones((4, 2), np.float32), ["a", "b"])
FILES = {
    "expm1": (lambda x: md.expm1(x), r"_OWN in BACKEND/operations/elementwise\.py"),
    "erf": (lambda x: md.erf(x), r"_OWN in BACKEND/operations/elementwise\.py"),
    "cumsum": (lambda x: md.cumsum(x, "a"), r"EMITTERS in BACKEND/operations/cumulative\.py"),
    "transpose": (lambda x: md.transpose(x, ["b", "a"]), r"EMITTERS in common/structure\.py"),
    "all_reduce": (lambda x: md.sum(x, "a"), r"EMITTERS in BACKEND/collectives\.py"),
}


CASES = [(backend, name) for backend in backends.BACKENDS for name in FILES]
CASES.remove(("jax_auto", "all_reduce"))  # global tensors need no collectives


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_missing_emitter_is_named_with_the_file_to_put_it_in(monkeypatch, backend, name):
    function, file = FILES[name]
    mesh, layout = ("m:2", "a:m") if name == "all_reduce" else ("m:1", "")
    where = {"mesh": mesh, "layout": layout, "backend": backend}
    monkeypatch.delitem(backends.load(backend).EMITTERS, name)
    folder = backend.removesuffix("_auto")  # whose emitters are those of jax
    with pytest.raises(ValueError) as caught:
        md.jit(function, **where)(X)
    text = str(caught.value)
    assert f"backend {folder!r} has no emitter for instruction `{name}`" in text
    assert "tests/lowering/backends/test_missing.py:" in text
    table, _, place = file.replace("BACKEND", folder).partition(" in ")
    assert re.search(f"add a line to {table} in lowering/backends/{place} ", text)


def test_a_new_instruction_goes_to_the_file_of_its_family():
    program = md.jit(lambda x: md.expm1(x)).lower(X)
    (one,) = program.block.instructions
    with pytest.raises(ValueError, match="numpy/operations, in the file of its family"):
        emitter_of({}, replace(one, op="no_such"), "numpy")


def test_the_family_of_a_new_instruction_is_that_of_the_rule_that_writes_it(monkeypatch, tmp_path):
    (tmp_path / "attention").mkdir()
    for file, written in (
        ("cumulative.py", 'builder.add("log_sums", inputs, results)'),
        ("attention/rules.py", 'builder.add("log_scores", inputs, results)'),
        ("logs.py", 'builder.add("log_digits", inputs, results)'),
    ):
        (tmp_path / file).write_text(written)
    monkeypatch.setattr(missing, "_RULES", tmp_path)
    (exp,) = md.jit(lambda x: md.exp(x)).lower(X).block.instructions
    new_file = "the new file lowering/backends/numpy/operations/logs.py, and the file to lowering/"
    for name, file in (
        ("log_sums", "EMITTERS in lowering/backends/numpy/operations/cumulative.py "),
        ("log_scores", "EMITTERS in lowering/backends/numpy/operations/attention.py "),
        ("log_digits", f"EMITTERS in {new_file}backends/numpy/emitters.py "),
    ):
        with pytest.raises(ValueError, match=re.escape(f"add a line to {file}")):
            emitter_of({}, replace(exp, op=name), "numpy")


def test_every_collective_can_travel_with_others_of_its_kind():
    assert set(of_jax._PACKINGS) == set(of_tf._PACKINGS) == set(COLLECTIVES)


def test_a_collective_that_cannot_travel_with_others_is_named(monkeypatch):
    monkeypatch.delitem(of_jax._PACKINGS, "all_reduce")
    function = md.jit(lambda x: (md.sum(x, "a"), md.sum(x * x, "a")), "m:2", "a:m")
    with pytest.raises(ValueError, match=r"`all_reduce` .* _PACKINGS of .*jax/collectives\.py"):
        function(X)
