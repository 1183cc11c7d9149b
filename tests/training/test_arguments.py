"""Arguments of `train` of the wrong kind: each is refused by its name, before anything runs."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.training.loop import train as train_with_records
from tests.training.flat import train

embed, out = md.dims(embed=4, out=2)
WEIGHTS = np.arange(8, dtype=np.float32).reshape(4, 2)
IMAGES = np.ones((4, 4), np.float32)


def init(key):
    return {"w": md.named(WEIGHTS, [embed, out])}


def loss(params, batch):
    return md.mean(md.square(md.einsum(batch["x"], params["w"], over="embed")))


def run(init=init, loss=loss, optimizer=None, steps=2, **given):
    batches = [{"x": md.named(IMAGES, ["batch", "embed"])}] * 2
    optimizer = optimizer or optim.Sgd(0.1)
    return train(init, loss, optimizer, batches, steps=steps, quiet=True, **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nonfinite": "ignore"}, "nonfinite is one of stop, skip, not 'ignore'"),
        ({"nonfinite": "skipp"}, "not 'skipp'. Did you mean `skip`?"),
        ({"seed": "a"}, "seed is a whole number, not 'a'"),
        ({"steps": 1.5}, "steps is a whole number, not 1.5"),
        ({"log_every": True}, "log_every is a whole number, not True"),
        ({"microbatches": "2"}, "microbatches is a whole number, not '2'"),
        ({"init": {}}, "init is a function from a key to the parameters, not {}"),
        ({"loss": 3}, "loss is a function of the parameters and a batch, not 3"),
        ({"update": 3}, "update is a function of the parameters and what the loss adds, not 3"),
        ({"loss_scaling": "dynamic"}, "loss_scaling is LossScaling() of meshdsl.training"),
        ({"saving": 5, "workdir": "x"}, "saving is Saving(every=500) of"),
        ({"workdir": 3}, "workdir is a path, not 3"),
        ({"batch_dims": ["batch"]}, "batch_dims are the dims of each entry, as in {'image'"),
        ({"batch_dim": 3}, "batch_dim is the name of a dim, not 3"),
        ({"policy": 3}, 'a policy is given as "params=float32,compute=bfloat16" or as a md.Policy'),
        ({"policy": "bf16"}, "unknown dtype 'bf16'"),
        ({"policy": "bf16"}, "Did you mean `bfloat16`?"),
        ({"options": {"memory": 3}}, "options are given as md.Options(memory=16 * 2**30), not as"),
        ({"layout": 3}, "or as a md.Layout, not as int: 3"),
        ({"backend": 3}, "unknown backend 3"),
        ({"extra_metrics": "params_norm"}, "a list of names, as in ['params_norm']"),
        ({"optimizer": optim.AdamW}, "made from its class AdamW first, as in optim.AdamW(1e-3)"),
        (
            {"seed": "a", "microbatches": "b"},
            "Recipe: microbatches is a whole number, not 'b'; seed is a whole number, not 'a'",
        ),
        ({"steps": "b", "steps_per_call": 0}, "steps_per_call must be at least 1, got 0"),
        ({"extra_metrics": ["norm"]}, "unknown metric 'norm'; choose from num_zeros, params_norm"),
        ({"clip_norm": 0}, "clip_norm must be above 0, got 0; None clips nothing"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_its_name(given, text):
    with pytest.raises(ValueError) as error:
        run(**given)
    assert text in str(error.value)


def test_what_fits_is_no_mistake():
    result = run(steps=np.int64(2), eval_every=None, nonfinite="skip", saving=None)
    assert result.step == 2


def test_what_is_no_record_is_refused_with_the_one_to_give():
    with pytest.raises(ValueError) as error:
        train_with_records(loss, [], steps=2, evaluation=[], reporting=10, stops=3, health=1)
    told = str(error.value)
    assert told.startswith(
        "train: recipe is Recipe(init, loss, optimizer) of meshdsl.training, not "
    )
    assert "; evaluation is Evaluation(held_out) of meshdsl.training, not []" in told
    assert "; reporting is Reporting(log_every=100) of meshdsl.training, not 10" in told
    assert "; stops is Stops(...) of meshdsl.training.stopping, not 3" in told
    assert "; health is Health(...) of meshdsl.training, not 1" in told


@pytest.mark.parametrize("name", ["sgd", "adamw", "optax"])
def test_training_may_start_from_given_weights(name):
    """Against one step of gradient descent by jax, and for AdamW the first loss."""
    optax = pytest.importorskip("optax")
    optimizer = {"sgd": optim.Sgd(0.1), "adamw": optim.AdamW(0.1), "optax": optax.sgd(0.1)}[name]

    def plain(w):
        return jax.numpy.mean(jax.numpy.square(IMAGES @ w))

    after = WEIGHTS - 0.1 * jax.grad(plain)(WEIGHTS)
    found = run(optimizer=optimizer, layout={"batch": "data"}, mesh={"data": 2})
    assert found.losses[0] == pytest.approx(float(plain(WEIGHTS)))
    if name != "adamw":
        assert found.losses[1] == pytest.approx(float(plain(after)))


def test_a_policy_holds_for_given_weights_and_may_be_text():
    found = run(policy="params=bfloat16,compute=float32", steps=1)
    assert found.state.params["w"].dtype.name == "bfloat16"
