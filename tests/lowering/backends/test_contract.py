"""The contract of backends: ours keep it, and so does a fourth one that only prints."""

import sys
import types

import numpy as np
import pytest

import meshdsl as md
from meshdsl.lowering import backends
from meshdsl.lowering.backends.contract import missing
from meshdsl.ops.control import local

X = md.named(np.arange(4, dtype=np.float32), ["a"])


class Printing:
    """An executable that prints its program and returns zeros."""

    def __init__(self, program, donated=(), devices=None):
        self.program = program
        self.cuts = [()] * len(program.block.outputs)

    def call_flat(self, leaves):
        print(self.as_text())
        return [np.zeros(value.shape.sizes, value.dtype) for value in self.program.block.outputs]

    def as_text(self):
        return str(self.program)

    def memory_analysis(self):
        return self.program.memory


def printing():
    module = types.ModuleType("printing")
    numpy = backends.load("numpy")
    module.EMITTERS, module.runtime = dict(numpy.EMITTERS), numpy.runtime
    module.Executable = Printing
    return module


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_our_backends_keep_it(name):
    assert missing(backends.load(name)) == []


@pytest.mark.long
@pytest.mark.parametrize("name", backends.BACKENDS)
def test_executables_run_and_say_what_was_made_of_the_program(name):
    compiled = md.jit(lambda x: x * 2, backend=name).lower(X).compile()
    (found,) = compiled.executable.call_flat([X.data])
    np.testing.assert_array_equal(np.asarray(found), X.data * 2)
    assert compiled.as_text()
    if name in backends.ON_JAX:
        assert compiled.memory_analysis() is not None
    else:
        with pytest.raises(ValueError, match=rf"backend '{name}' .* read program\.memory"):
            compiled.memory_analysis()


def test_a_backend_that_only_prints_keeps_it_and_runs(capsys):
    backend = printing()
    assert missing(backend) == []
    program = md.jit(lambda x: x * 2, mesh="data:2", layout="a:data").lower(X)
    (found,) = backends.executable(backend, program).call_flat([X.data])
    assert found.shape == (4,)
    assert "program <lambda> on data:2" in capsys.readouterr().out


def test_what_is_missing_is_named():
    backend = printing()
    del backend.EMITTERS["einsum"]
    backend.EMITTERS["einsun"] = None
    backend.runtime = types.SimpleNamespace(process_count=None, process_index=None)
    backend.Executable = type("Executable", (), {"call_flat": None})
    assert missing(backend) == [
        "EMITTERS['einsum']",
        "EMITTERS['einsun'], which is no instruction",
        "runtime.device_kind",
        "runtime.memory_peak",
        "runtime.profile",
        "Executable.as_text",
        "Executable.memory_analysis",
    ]
    assert missing(types.ModuleType("nothing")) == ["EMITTERS", "Executable", "runtime"]


def test_a_backend_in_the_list_whose_folder_lacks_a_part_is_refused_with_its_file(monkeypatch):
    module = types.ModuleType("meshdsl.lowering.backends.show")
    module.EMITTERS = {}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "BACKENDS", ("show",))
    lacks = r"backend 'show' lacks Executable, runtime: define them in lowering/backends/show, "
    with pytest.raises(ValueError, match=lacks):
        backends.load("show")
    module.runtime = backends.importlib.import_module("meshdsl.lowering.backends.numpy").runtime
    module.Executable = type("Executable", (), {"as_text": None})
    lacks = "lacks Executable.call_flat, Executable.memory_analysis: define them in .*show, "
    with pytest.raises(ValueError, match=lacks):
        backends.load("show")


def test_a_backend_in_the_list_without_a_folder_is_refused_with_the_file_to_write(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", ("show",))
    missing_folder = r"'show' is listed in BACKENDS of .* no folder: write .*show/__init__\.py"
    with pytest.raises(ValueError, match=missing_folder):
        backends.load("show")


def test_a_backend_whose_framework_is_not_installed_says_which(monkeypatch):
    def without(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(backends, "BACKENDS", ("show",))
    monkeypatch.setattr(backends.importlib, "import_module", without)
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        backends.load("show")


def test_users_give_emitters_for_every_backend_with_emitters_of_its_own():
    assert set(local.BACKENDS) == set(backends.BACKENDS) - {"jax_auto"}, (
        "list the backend in BACKENDS of meshdsl/ops/control/local.py"
    )
