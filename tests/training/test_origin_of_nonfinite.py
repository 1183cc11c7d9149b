"""A run that stops names the operation that first made a value that is not finite."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import optim
from tests.training.flat import train

ROWS = 8
_ADVICE = "a lower learning rate or clip_norm"  # acts on gradients
WHERE = [
    {},
    {"backend": "jax", "mesh": "data:4", "layout": "batch:data"},
    {"microbatches": 4},
    {"mesh": "data:2", "layout": "batch:data", "microbatches": 4},
    {"mesh": "model:2", "layout": "embed:model"},
]
NAMES = ["one device", "mesh", "microbatches", "mesh and microbatches", "split dim"]


def init(key):
    return {"scale": md.ones(md.dims(embed=4))}


def log_loss(params, batch):
    return md.mean(md.log(batch["x"] * params["scale"]))  # log


def sqrt_loss(params, batch):
    return md.mean(md.sqrt(batch["x"] * params["scale"]))  # sqrt


def remat_loss(params, batch):
    return md.checkpoint(lambda s: md.mean(md.log(s)))(batch["x"] * params["scale"])  # log


def scan_loss(params, batch):
    def body(total, row):
        return total + md.mean(md.log(row * params["scale"])), None  # log

    return md.scan(md.checkpoint(body), md.zeros([]), batch["x"], "batch")[0]


def report(loss, value, **options):
    """Returns the error of a run on data that is 1 but for one element."""
    x = np.ones((ROWS, 4), np.float32)
    x[3, 2] = value
    batches = [{"x": md.named(x, ["batch", "embed"])}]
    options = {"backend": "numpy", "quiet": True} | options
    with pytest.raises(ValueError, match="step 1: the loss is") as error:
        train(init, loss, optim.AdamW(1e-3), batches, steps=1, **options)
    return str(error.value)


@pytest.mark.parametrize("where", WHERE, ids=NAMES)
@pytest.mark.parametrize("loss", [log_loss, remat_loss])
def test_the_forward_pass_is_named_before_the_backward_pass(loss, where):
    text = report(loss, 0, **where)
    assert "the result loss: f32[] is not finite" in text
    assert "first made by log, of finite operands: 1 infinite of " in text
    assert "# log" in text and "(backward)" not in text
    assert _ADVICE not in text


def test_in_a_checkpointed_scan_too():
    text = report(scan_loss, 0)
    assert "first made by log, of finite operands: 1 infinite of 4 values" in text
    assert f"step 3 of batch ({ROWS})" in text and "(backward)" not in text


@pytest.mark.parametrize("where", WHERE, ids=NAMES)
def test_what_only_the_backward_pass_makes_is_named_there(where):
    text = report(sqrt_loss, 0, **where)
    assert "the result grad_norm: f32[] is not finite" in text
    assert "first made by divide, of finite operands: 1 infinite of " in text
    assert '(backward)  return md.mean(md.sqrt(batch["x"]' in text
    assert _ADVICE in text


@pytest.mark.parametrize("where", WHERE, ids=NAMES)
def test_an_input_is_named(where):
    text = report(sqrt_loss, np.inf, **where)
    assert "it comes from the input batch/x: 1 infinite of 32 values" in text
    assert _ADVICE not in text


def test_a_metric_that_is_infinite_is_not_to_blame():
    def loss(params, batch):
        return sqrt_loss(params, batch), {"large": md.exp(md.sum(params["scale"]) * 100)}

    text = report(loss, 0)
    assert "first made by divide" in text and "# sqrt" in text


def test_a_loss_that_updates_made_infinite_has_advice():
    def loss(params, batch):
        return md.mean(md.square(batch["x"] * params["scale"]))

    batches = [{"x": md.named(np.ones((ROWS, 4), np.float32), ["batch", "embed"])}] * 2
    with pytest.raises(ValueError, match="step 2: the loss is inf") as error:
        train(init, loss, optim.Sgd(1e30), batches, steps=2, backend="numpy", quiet=True)
    assert f"if the loss grew before, {_ADVICE} may" in str(error.value)
