"""Metrics of a step that are computed only if asked for."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.optim import Sgd
from meshdsl.training.state import create
from meshdsl.training.step import make_train_step
from tests.training import classifier


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("where", [classifier.LAYOUTS[0], classifier.LAYOUTS[3]])
def test_they_are_those_of_plain_numpy(where, backend):
    optimizer = Sgd(0.2)
    (batch,) = classifier.batches(1)
    batch["image"][:, 3:5] = 0  # two rows of w_in without a gradient
    state = md.jit(create(classifier.init, optimizer), *where, backend)(md.random.key(0))
    weights = [np.asarray(getattr(state.params, n), "f8") for n in ("w_in", "bias", "w_out")]
    _, grads = classifier.numpy_loss_and_grads(*weights, batch)
    step = make_train_step(classifier.loss, optimizer, extra_metrics=["num_zeros", "params_norm"])
    _, metrics = md.jit(step, *where, backend)(state, classifier.named(batch))
    assert float(metrics["num_zeros"]) == sum((g == 0).sum() for g in grads) == 16
    after = [w - 0.2 * g for w, g in zip(weights, grads, strict=True)]
    norm = np.sqrt(sum((w**2).sum() for w in after))
    np.testing.assert_allclose(float(metrics["params_norm"]), norm, rtol=1e-6)


def test_unknown_ones_are_told():
    with pytest.raises(ValueError) as error:
        make_train_step(classifier.loss, Sgd(0.1), extra_metrics=["num_zero", "params_norm", "x"])
    assert str(error.value) == (
        "unknown metric 'num_zero'; choose from num_zeros, params_norm. Did you mean `num_zeros`?; "
        "unknown metric 'x'; choose from num_zeros, params_norm"
    )
