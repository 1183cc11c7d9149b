"""A loss that reads an entry which the batch lacks: one error names it, and only such a loss."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.optim import Sgd
from meshdsl.training import Evaluation, Recipe, Reporting, train
from meshdsl.training.batch_entries import MissingEntry

QUIET = Reporting(quiet=True)


def init(key):
    return {"w": md.random.normal(key, md.dims(pixel=4))}


def batch(*names):
    return {name: md.named(np.ones((8, 4), np.float32), ["batch", "pixel"]) for name in names}


def square(image, params):
    return md.mean(md.square(image * params["w"]))


def loss(params, batch):
    return square(batch["image"], params)


def step(loss, *names, held_out=None, **more):
    evaluation = held_out and Evaluation([batch(*held_out)])
    return train(
        Recipe(init, loss, Sgd(0.1), **more),
        [batch(*names)],
        steps=1,
        backend="numpy",
        evaluation=evaluation,
        reporting=QUIET,
    )


@pytest.mark.parametrize(
    "more",
    [{}, {"microbatches": 2}, {"policy": "bfloat16"}, {"precision": "fp8"}, {"trainable": "w"}],
    ids=str,
)
def test_an_entry_that_the_loss_misspells_is_told_at_its_line(more):
    with pytest.raises(MissingEntry) as error:
        step(loss, "images", "label", **more)
    assert str(error.value).startswith(
        "the loss reads image of a batch that has images, label: no `image` (did you mean `images`?"
        ")\n"
        "  at tests/training/test_batch_entries.py:"
    )
    assert str(error.value).endswith('  return square(batch["image"], params)')
    assert error.value.__suppress_context__


def test_all_of_them_are_told_with_what_is_read_and_what_there_is():
    def both(params, batch):
        return square(batch["image"], params) + square(batch["labels"], params)

    with pytest.raises(MissingEntry) as error:
        step(both, "images", "label", "row")
    assert str(error.value).partition("\n  at ")[0] == (
        "the loss reads image, labels of a batch that has images, label, row: no `image` (did you "
        "mean `images`?), `labels` (did you mean `label`?)"
    )


def test_nothing_near_is_no_hint():
    with pytest.raises(MissingEntry) as error:
        step(loss, "x")
    assert str(error.value).startswith(
        "the loss reads image of a batch that has x: no `image`\n  at "
    )


def test_the_batches_of_an_evaluation_are_told_too():
    with pytest.raises(MissingEntry, match=r"no `image` \(did you mean `images`"):
        step(loss, "image", held_out=["images"])


def test_a_missing_key_of_something_else_stays_what_it_is():
    def other(params, batch):
        return square(batch["image"], params) * {"one": 1.0}["two"]

    def of_params(params, batch):
        return square(batch["image"], params) + params["bias"]

    for function, key in ((other, "two"), (of_params, "bias")):
        with pytest.raises(KeyError) as error:
            step(function, "image")
        assert error.value.args == (key,)
        assert not getattr(error.value, "__notes__", [])


def test_a_loss_that_can_do_without_an_entry_is_not_disturbed():
    def optional(params, batch):
        try:
            return square(batch["mask"], params)
        except KeyError:
            return square(batch.get("masks", batch["image"]), params)

    assert len(step(optional, "image").losses) == 1
