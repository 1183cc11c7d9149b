"""Every family has the same loss and gradients on a split mesh as on one device, in float64."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl import models

SIZES = "layers=2,embed=16,heads=4,d_ff=8,policy=float64"
TENSOR = "batch:data; heads:model; d_ff:model; vocab:model; length:model?"
EXPERT = "batch:data+model?; experts:model; vocab:model?"
CASES = {
    "bert": ("bert_mini", SIZES, TENSOR),
    "t5": ("t5_mini", f"{SIZES},kv=4", TENSOR),
    "t5 of experts": ("t5_mini", f"{SIZES},kv=4,experts=4,positions=learned", EXPERT),
    "mixtral": ("mixtral_mini", SIZES, EXPERT),
    "deepseek": ("deepseek_mini", f"{SIZES},kv=4,kv_rank=8,query_rank=8,rotary_kv=4", TENSOR),
    "alibi": ("gpt_mini", f"{SIZES},kv_heads=2,positions=alibi,norm_order=post,mlp=geglu", TENSOR),
    "relative": ("gpt_mini", f"{SIZES},kv_heads=2,positions=relative,window=5,mlp=relu", TENSOR),
    "resnet": (
        "resnet_mini",
        "stem=4,filters=2+4,block=bottleneck,policy=float64",
        "batch:data; height:model; channels:model?",
    ),
    "unet3d": (
        "unet3d_mini",
        "filters=4,groups=3,norm=batch,policy=float64",
        "depth:data; channels:model",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_do_not_depend_on_the_layout(case):
    name, overrides, layout = CASES[case]
    model = models.load(name, overrides)
    rng = np.random.default_rng(0)
    batch = {
        key: md.named(
            rng.integers(0, 3, spec.dims.sizes).astype("int32")
            if spec.dtype == np.int32
            else rng.normal(size=spec.dims.sizes),
            spec.dims,
        )
        for key, spec in model.batch_spec(4, 8).items()
    }
    params = md.jit(model.init, backend="numpy")(md.random.key(0))
    step = md.value_and_grad(model.loss)
    loss, gradients = md.jit(step, backend="numpy")(params, batch)
    where = {"mesh": "data:2,model:2", "layout": layout, "backend": "numpy"}
    found, others = md.jit(step, **where)(params, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-8)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        # The tables of rotary positions are float32.
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
