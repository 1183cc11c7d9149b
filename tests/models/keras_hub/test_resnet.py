"""ResNet returns what KerasHub's does on its JAX backend, and has the same gradients.

In float32 with random weights and random moving statistics, to 1e-4 of each array's scale.
"""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.models import resnet
from tests.models.keras_hub.compare import check, reference, single

BLOCKS = ["stack0_block0", "stack1_block0", "stack1_block1"]


def layers_of(block, convolutions):
    """Returns KerasHub's names of the convolutions of a block, in the order in which ours run."""
    names = [f"{block}_{n}" for n in range(1, convolutions + 1)]
    return names, f"{block}_0"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "convolutions"),
    [
        pytest.param("resnet", "bottleneck", 3, marks=pytest.mark.slow),
        ("resnet_basic", "basic", 2),
    ],
)
def test_resnet(name, kind, convolutions):
    model = models.load("resnet50", f"blocks=1+2,filters=64+8,strides=1+2,block={kind},classes=3")
    weights = reference(name)["weight"]
    mapping = {"w_out": None, "bias_out": None}
    order = []

    def convolution(ours, theirs):
        mapping[f"{ours}/weights"] = single(f"{theirs}_conv/kernel")
        mapping[f"{ours}/norm/scale"] = single(f"{theirs}_bn/gamma")
        mapping[f"{ours}/norm/bias"] = single(f"{theirs}_bn/beta")
        order.append(f"{theirs}_bn")

    convolution("stem", "conv1")
    for number, block in enumerate(BLOCKS):
        names, shortcut = layers_of(block, convolutions)
        for at, theirs in enumerate(names):
            convolution(f"blocks/{number}/layers/{at}", theirs)
        if f"{shortcut}_conv/kernel" in weights:
            convolution(f"blocks/{number}/shortcut", shortcut)

    def given(inputs):
        moving = [(weights[f"{n}/moving_mean"], weights[f"{n}/moving_variance"]) for n in order]
        as_named = [[md.named(np.float32(a), ["channels"]) for a in pair] for pair in moving]
        image = md.named(inputs["image"], ["batch", "height", "width", "colors"])
        return {"image": image, "statistics": as_named}

    def states(params, given):
        x, _ = resnet.features(model.config, params, given["image"], given["statistics"])
        return {"states": x}

    where = {"mesh": "data:2,rows:2", "layout": "batch:data; height:rows"}
    outputs = {"states": ["batch", "height", "width", "channels"]}
    check(name, model.init, states, mapping, given, outputs, **where)
