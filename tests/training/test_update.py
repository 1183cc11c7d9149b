"""Parameters that no gradient trains: `update` changes them, after the optimizer's step."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.optim import AdamW
from tests.training import classifier
from tests.training.flat import train

RATE = 0.1


class Normalised(md.Module):
    net: classifier.Classifier
    mean: md.Tensor  # pixel, float32: a running mean of the images


def init(key):
    return Normalised(classifier.init(key), md.zeros([classifier.pixel]))


def loss(params, batch):
    shifted = batch["image"] - md.stop_gradient(params.mean)
    value = classifier.loss(params.net, {**batch, "image": shifted})
    return value, {"mean": md.mean(batch["image"], "batch"), "largest": md.max(shifted)}


def update(params, added):
    return replace(params, mean=params.mean + RATE * (added["mean"] - params.mean))


def run(steps=5, given=None, **options):
    defaults = {"batch_dims": classifier.BATCH_DIMS, "quiet": True, "backend": "numpy"}
    data = classifier.endless() if given is None else given
    optimizer = AdamW(0.05, weight_decay=0.1, mask=lambda path, shape: True)
    return train(
        init, loss, optimizer, data, steps=steps, **{"update": update, **defaults, **options}
    )


def running_mean(batches):
    mean = np.zeros(classifier.pixel.size)
    for batch in batches:
        mean += RATE * (batch["image"].astype("f8").mean(0) - mean)
    return mean


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2},
        {"trainable": "net"},
        {"mesh": "data:2,model:4", "layout": f"{classifier.LAYOUT}; params/pixel:data"},
        {"backend": "jax", "mesh": "data:4", "layout": "batch:data", "microbatches": 4},
    ],
)
def test_what_no_gradient_trains_is_updated_after_the_optimizer(options):
    found = run(**options)
    expected = running_mean(itertools.islice(classifier.endless(), 5))
    np.testing.assert_allclose(found.state.params.mean, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.losses, run().losses, rtol=2e-5)


def test_what_it_is_given_is_a_metric_if_it_has_no_dims():
    history = run(eval_batches=classifier.batches(2)).history[-1]
    assert {"largest", "eval_largest"} <= {*history}
    assert not {"mean", "eval_mean"} & {*history}


def test_a_step_that_is_not_finite_updates_nothing():
    good, bad = classifier.batches(2)
    bad["image"][0, 0] = np.inf
    with pytest.warns(UserWarning, match="not finite"):
        found = run(2, [good, bad], nonfinite="skip")
    np.testing.assert_allclose(found.state.params.mean, running_mean([good]), rtol=1e-5, atol=1e-6)


def test_it_must_return_the_parameters_that_it_was_given():
    def other(params, added):
        net = params.net.replace(bias=np.zeros(8))
        return {"net": net, "mean": md.cast(params.mean, "bfloat16"), "new": params.mean}

    with pytest.raises(ValueError, match="must return the parameters as it was given") as error:
        run(update=other)
    told = str(error.value).splitlines()
    assert "test_update.py" in told[0]
    assert told[1:] == [
        "  new: not a parameter",
        "  net/bias: of type ndarray instead of f32[hidden=8]",
        "  mean: bf16[pixel=12] instead of f32[pixel=12]",
    ]


def test_without_it_metrics_with_dims_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"metric `mean` has dims .*, or give `update`"):
        run(update=None)


SMALL = "layers=2,embed=32,heads=2,d_ff=16,vocab=64,query_rank=none,kv_rank=16,kv=16,rotary_kv=8"
BIASED = f"{SMALL},router_score=sigmoid,router_bias=true,balance_weight=0,dense_d_ff=32"


def language():
    rng = np.random.default_rng(0)
    while True:
        tokens = rng.zipf(1.5, (8, 33)).clip(0, 63).astype("i4")
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.long
def test_the_loads_of_experts_get_even():
    model = models.load("deepseek_mini", BIASED)
    dims = {name: ["batch", "length"] for name in ("tokens", "targets")}
    params = train(
        model.init,
        model.loss,
        AdamW(1e-3),
        language(),
        steps=120,
        update=model.update,
        batch_dims=dims,
        mesh="data:2,expert:2",
        layout="batch:data; experts:expert",
        quiet=True,
    ).state.params
    batch = {name: md.named(x, dims[name]) for name, x in next(language()).items()}
    loss = md.jit(model.loss)

    def unevenness(params):
        tokens = np.asarray(loss(params, batch)[1]["tokens"])
        assert tokens.sum() == 8 * 32 * 2  # one layer with experts, two of them for each token
        return tokens.std() / tokens.mean()

    mlp = params.blocks.mlp
    without = replace(mlp, bias=md.named(np.zeros((1, 8), "f4"), mlp.bias.dims))
    assert 0 < np.abs(np.asarray(mlp.bias)).max() <= 0.120001  # 120 steps of 0.001
    unbiased = replace(params, blocks=replace(params.blocks, mlp=without))
    assert unevenness(params) < 0.6 * unevenness(unbiased)


def test_a_bias_that_nothing_would_balance_is_refused():
    with pytest.raises(ValueError, match="router_bias is for decoder-only models"):
        models.load("t5_mini", "experts=4,router_bias=true")
    with pytest.raises(ValueError, match="router_bias is for decoder-only models"):
        models.load("bert_mini", "experts=4,router_bias=true")
    with pytest.raises(ValueError, match="router_bias balances experts; give experts"):
        models.load("gpt_mini", "router_bias=true")
