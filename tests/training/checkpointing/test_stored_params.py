"""Parameters of a checkpoint, read by themselves: on the host, and in blocks on devices."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.training import Recipe, Reporting, Saving, train
from meshdsl.training.checkpointing.checkpoints import Checkpoints, CheckpointWarning
from meshdsl.training.checkpointing.exporting import export
from meshdsl.training.checkpointing.saving import FOLDER
from meshdsl.training.checkpointing.stored_params import StoredParams
from meshdsl.training.programs import places
from meshdsl.training.state import TrainState

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


def test_the_best_is_the_undamaged_one_of_the_least_loss(tmp_path):
    state = TrainState(md.named(np.int32(0), []), {"b": md.named(np.zeros(4), [CLASSES])}, {})
    folder = tmp_path / FOLDER
    with Checkpoints(folder, keep=9) as checkpoints:
        for step, eval_loss in enumerate([3.0, 1.0, np.nan, 0.5, 2.0], 1):
            checkpoints.save(step, state, eval_loss=eval_loss)
        checkpoints.save(6, state)
    assert StoredParams.of(tmp_path).step == 6
    assert StoredParams.of(tmp_path, "best").step == 4
    assert export(tmp_path, tmp_path / "best.safetensors", "best").step == 4
    next((folder / "4" / "state").rglob("manifest.ocdbt")).write_bytes(b"")
    with pytest.warns(CheckpointWarning, match="4 is damaged"):
        assert StoredParams.of(tmp_path, "best").step == 2


def test_a_run_that_was_not_evaluated_has_no_best_checkpoint(saved):
    message = r"was saved with an eval_loss: .* --checkpoint_every be a multiple of --eval_every"
    with pytest.raises(ValueError, match=message):
        StoredParams.of(saved[0], "best")
