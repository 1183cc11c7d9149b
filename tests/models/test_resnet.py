"""Residual networks: what they leave, what splitting them moves, and how they begin."""

import functools

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models import resnet
from meshdsl.training.state import spec_of

TINY = "stem=4,filters=2+4,norm=group,groups=2"
RNG = np.random.default_rng(0)


def run(function, *args):
    return md.jit(function, backend="numpy")(*args)


def pictures(batch=2, side=16):
    return md.named(
        RNG.normal(size=(batch, side, side, 3)).astype("float32"),
        ["batch", "height", "width", "colors"],
    )


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_each_stage_halves_the_picture_as_its_stride_says(kind):
    config = models.load("resnet_mini", f"block={kind}").config
    graph = md.jit(
        lambda key, image: resnet.features(config, resnet.init(config, key), image)[0]
    ).trace(md.random.key(0), md.spec(md.dims(batch=2, height=48, width=32, colors=3)))
    channels = config.filters[-1] * (4 if kind == "bottleneck" else 1)
    assert str(graph.outputs[0].shape) == f"[batch=2, height=6, width=4, channels={channels}]"


def test_group_norm_leaves_pictures_of_a_batch_apart():
    model = models.load("resnet_mini", TINY)
    params = run(model.init, md.random.key(0))
    scores = functools.partial(resnet.logits, model.config)
    image = pictures()
    both = np.asarray(run(scores, params, image))
    alone = md.named(np.asarray(image)[:1], image.dims.names)
    np.testing.assert_allclose(run(scores, params, alone), both[:1], rtol=1e-5, atol=1e-6)


def test_a_network_begins_with_blocks_that_pass_on_what_they_are_given():
    model = models.load("resnet_mini", "stem=4,filters=4+4,strides=1+1,norm=group,groups=2")
    params = run(model.init, md.random.key(0))
    image = pictures()
    with_blocks, _ = run(functools.partial(resnet.features, model.config), params, image)
    without, _ = run(
        functools.partial(resnet.features, model.config), params.replace(blocks=[]), image
    )
    np.testing.assert_allclose(with_blocks, without, rtol=1e-6)


def test_statistics_of_several_batches_are_averaged():
    one = [
        (md.named(np.array([1.0, 2.0]), ["channels"]), md.named(np.array([4.0, 4.0]), ["channels"]))
    ]
    other = [
        (md.named(np.array([3.0, 2.0]), ["channels"]), md.named(np.array([2.0, 0.0]), ["channels"]))
    ]
    ((mean, variance),) = run(lambda a, b: resnet.mean_statistics([a, b]), one, other)
    np.testing.assert_array_equal(mean, [2, 2])
    np.testing.assert_array_equal(variance, [3, 2])


def test_rows_split_over_devices_are_exchanged_and_nothing_is_gathered():
    model = models.load("resnet50", "classes=10")
    program = md.jit(
        md.value_and_grad(model.loss), mesh="data:2,rows:4", layout="batch:data; height:rows"
    ).lower(spec_of(model.init), model.batch_spec(8, 224))
    kinds = {c.kind for c in program.collectives}
    assert kinds == {"permute", "all_reduce"}
    rows = sum(c.wire_bytes for c in program.collectives if c.kind == "permute")
    picture = 4 * 4 * 224 * 224 * 3  # batch on this device, bytes of a number
    assert rows < 8 * picture  # less than 53 layers and their gradients hold by far
