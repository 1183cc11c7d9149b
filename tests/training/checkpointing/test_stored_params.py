"""Parameters of a checkpoint, read by themselves: on the host, and in blocks on devices."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.training import Recipe, Reporting, Saving, train
from meshdsl.training.checkpointing.stored_params import StoredParams
from meshdsl.training.programs import places

HIDDEN, CLASSES = md.dims(hidden=6, classes=4)


def init(key):
    return {"w": md.random.normal(key, [HIDDEN, CLASSES]), "b": md.zeros([CLASSES])}


def loss(params, batch):
    y = md.einsum(batch["x"], params["w"], over="hidden") + params["b"]
    return md.mean(md.square(y))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    batches = [{"x": md.named(np.ones((2, 6), np.float32), ["batch", "hidden"])}] * 2
    saving = Saving(config={"model": "mine"})
    recipe, quiet = Recipe(init, loss, optim.Sgd(0.1)), Reporting(quiet=True)
    done = train(
        recipe, batches, steps=2, backend="numpy", workdir=folder, saving=saving, reporting=quiet
    )
    return folder, done.state.params


def test_parameters_come_in_the_blocks_of_their_devices(saved):
    folder, params = saved
    stored = StoredParams.of(folder)
    assert (stored.step, stored.config) == (2, {"model": "mine"})
    like = {name: md.spec(each.dims, each.dtype) for name, each in params.items()}
    same = md.jit(lambda params: {"params": params}, "data:2,model:4", "hidden:data; classes:model")
    compiled = same.lower(like).compile()
    loaded = stored.load(like, places(compiled, like))
    for name, each in params.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(each))
        assert isinstance(loaded[name].data, jax.Array)
    assert loaded["w"].data.sharding.shard_shape((6, 4)) == (3, 1)
    compiled(loaded)
    on_host = stored.load(like, [None, None])
    assert isinstance(on_host["w"].data, np.ndarray)


def test_another_model_is_told(saved):
    stored = StoredParams.of(saved[0])
    with pytest.raises(ValueError) as error:
        stored.check({"w": md.spec([CLASSES]), "c": md.spec([CLASSES])})
    assert str(error.value) == (
        f"checkpoint {stored.folder} is of another model\n"
        "  c: not in the checkpoint\n"
        "  b: not of the model\n"
        "  w: f32[hidden=6, classes=4] in the checkpoint, f32[classes=4] in the model"
    )
