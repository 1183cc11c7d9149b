"""Training with every optimizer: the same losses on every layout, and after a stop."""

import itertools

import numpy as np
import optax
import pytest

from meshdsl.optim import Adafactor, Lion, Muon, from_optax, schedules
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.state import by_path
from meshdsl.training.stopping import Stops
from tests.training import classifier
from tests.training.flat import train

RATE = schedules.warmup_cosine(0.05, 2, 8)
OPTIMIZERS = {
    "adafactor": Adafactor(0.2, min_dim_size_to_factor=4, weight_decay=0.1),
    "lion": Lion(0.01, weight_decay=0.1),
    "muon": Muon(RATE, consistent_rms=0.2, weight_decay=0.1),
    "optax": optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.05, weight_decay=0.1)),
}


def run(name, steps=6, **options):
    data = itertools.chain.from_iterable(itertools.repeat(classifier.batches(8)))
    defaults = {"batch_dims": classifier.BATCH_DIMS, "quiet": True, "backend": "numpy"}
    options = defaults | options
    return train(classifier.init, classifier.loss, OPTIMIZERS[name], data, steps=steps, **options)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_the_same_on_every_layout(name, backend):
    expected = run(name)
    assert expected.losses[-1] < expected.losses[0]
    for mesh, layout in classifier.LAYOUTS[1:] if backend == "numpy" else classifier.LAYOUTS[3:]:
        found = run(name, mesh=mesh, layout=layout, backend=backend)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_from_its_checkpoint_on_another_layout(name, tmp_path):
    expected = run(name)
    saved = {"workdir": tmp_path, "saving": Saving()}
    part = run(name, mesh="data:8", layout="batch:data", stops=Stops(at_step=3), **saved)
    mesh, layout = classifier.LAYOUTS[3]
    rest = run(name, mesh=mesh, layout=layout, **saved)
    np.testing.assert_allclose([*part.losses, *rest.losses], expected.losses, rtol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_trained_has_no_state(name):
    found = run(name, 2, trainable="w_out,bias")
    assert not [path for path in by_path(found.state.optimizer) if path.endswith("w_in")]
    assert [path for path in by_path(found.state.optimizer) if path.endswith("w_out")]


@pytest.mark.long
def test_the_state_of_optax_is_split_like_the_parameters():
    found = run("optax", 1, backend="jax", mesh="data:4", layout="batch:data; params/pixel:data")
    held = by_path(found.state.optimizer)["1/0/mu/w_in"]
    assert {shard.data.shape for shard in held.data.addressable_shards} == {(3, 8)}


def test_the_learning_rate_is_reported_where_it_is_known(monkeypatch):
    assert "learning_rate" not in run("optax", 1).history[-1]
    assert run("muon", 1).history[-1]["learning_rate"] == 0.0
    monkeypatch.setitem(OPTIMIZERS, "named", from_optax(optax.sgd(0.25), 0.25))
    assert run("named", 1).history[-1]["learning_rate"] == 0.25


def test_what_is_no_optimizer_is_an_error_before_anything_runs(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "none", 0.1)
    with pytest.raises(ValueError, match=r"an optimizer is one of meshdsl.optim or of optax"):
        run("none", 1)
