"""SGD, against optax's."""

import optax
import pytest

import meshdsl as md
from meshdsl.optim import Sgd, schedules
from tests.optim import trees


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sgd_is_that_of_optax(momentum, nesterov, dtype):
    if nesterov and not momentum:
        return
    found, _ = trees.run(Sgd(0.1, momentum, nesterov), 4, dtype=dtype)
    expected = trees.run_optax(optax.sgd(0.1, momentum or None, nesterov), 4, dtype)
    trees.assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weight_decay_goes_through_the_gradient(momentum):
    found, _ = trees.run(Sgd(0.1, momentum, weight_decay=0.2), 4)
    decay = optax.add_decayed_weights(0.2, trees.DECAYS)
    expected = trees.run_optax(optax.chain(decay, optax.sgd(0.1, momentum or None)), 4)
    trees.assert_close(found, expected, 1e-6)


def test_a_schedule_sets_the_rate():
    found, _ = trees.run(Sgd(schedules.linear(0.1, 0.0, 5), 0.9), 5)
    expected = trees.run_optax(optax.sgd(optax.linear_schedule(0.1, 0.0, 5), 0.9), 5)
    trees.assert_close(found, expected, 1e-6)


def test_sharded_values_are_the_unsharded_ones_and_nothing_moves():
    optimizer = Sgd(0.1, 0.9, nesterov=True, weight_decay=0.1)
    found, state = trees.run(optimizer, 3, *trees.SHARDED)
    trees.assert_close(found, trees.run(optimizer, 3)[0], 1e-6)
    params = trees.tree(0)
    assert trees.collectives(optimizer.update, params, state, params, 0) == []


def test_without_momentum_there_is_no_state():
    assert trees.run(Sgd(0.1), 1)[1].velocity is None


def test_numbers_out_of_range():
    with pytest.raises(ValueError) as error:
        Sgd(0.1, momentum=1.0, weight_decay=-0.1)
    assert str(error.value) == (
        "Sgd: momentum must be in [0, 1), got 1.0; weight_decay must be in [0, inf), got -0.1"
    )
    with pytest.raises(ValueError, match=r"^Sgd: nesterov needs a momentum above 0$"):
        Sgd(0.1, nesterov=True)


def test_a_complex_parameter_is_told():
    params = {"w": md.spec(md.dims(a=4), "complex64")}

    def update(params, grads):
        return Sgd(0.1).update(grads, Sgd(0.1).init(params), params, 0)[0]

    with pytest.raises(ValueError, match=r"w is c64\[a=4\], but optimizers update real numbers: k"):
        md.jit(update).trace(params, params)
