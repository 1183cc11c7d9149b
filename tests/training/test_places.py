"""Where the programs of a run are lowered for: the TPUs at hand, or what the user names."""

import pytest

from meshdsl.lowering import backends
from meshdsl.lowering.options import Options
from meshdsl.training.programs import Place


def place(options=None, backend="jax"):
    return Place("data:2", "batch:data", backend, options)


@pytest.fixture
def kind(monkeypatch):
    def change(name):
        monkeypatch.setattr(backends.load("jax").runtime, "device_kind", lambda: name)

    return change


def test_tpus_decide_by_their_time(kind):
    kind("TPU v5p")
    found = place(Options(weights="keep")).on_its_devices()
    assert found.options == Options(weights="keep", hardware="v5p")
    assert place().on_its_devices().options == Options(hardware="v5p")


@pytest.mark.parametrize("name", ["cpu", "NVIDIA H100 80GB HBM3", "something else"])
def test_other_devices_decide_nothing(kind, name):
    kind(name)
    assert place().on_its_devices() == place()


def test_what_the_user_names_stays(kind):
    kind("TPU v5p")
    named = place(Options(hardware="v6e"))
    assert named.on_its_devices() == named
    assert place(backend="jax_auto").on_its_devices() == place(backend="jax_auto")
