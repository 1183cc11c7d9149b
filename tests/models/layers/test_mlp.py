"""Feed-forward layers inside of models: how many tokens experts take, and what moves them."""

from collections import Counter

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.optim import AdamW
from meshdsl.training import Recipe
from meshdsl.training.state import spec_of

LAYOUT = "batch:data+expert?; experts:expert"


def program_of(overrides, mesh="data:2,expert:4", layout=LAYOUT):
    model = models.load("mixtral_mini", overrides)
    return md.jit(md.value_and_grad(model.loss), mesh, layout, "numpy").lower(
        spec_of(model.init), model.batch_spec(8, 64)
    )


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
@pytest.mark.parametrize("layers", [1, 3])
def test_each_layer_of_experts_makes_two_all_to_alls_forward_and_two_backward(layers, dispatch):
    program = program_of(f"layers={layers},dispatch={dispatch},shared_experts=1")
    made = Counter()
    for collective in program.collectives:
        if collective.kind == "all_to_all":
            made["backward" in str(collective.source)] += collective.count
    assert made == {False: 2 * layers, True: 2 * layers}
    assert {c.kind for c in program.collectives} == {"all_to_all", "all_reduce"}


def test_capacity_is_in_shares_of_the_tokens_of_a_sequence():
    """64 tokens with 2 of 4 experts each: an equal share is 32."""

    def slots(capacity):
        program = program_of(f"layers=1,capacity={capacity}")
        (payload,) = {c.payload_bytes for c in program.collectives if c.kind == "all_to_all"}
        return payload // (4 * 128 * 4 * 8 // 8)  # numbers: experts, embed, bytes, batch, devices

    assert [slots(c) for c in ("1", "1.25", "0.01", "none")] == [32, 40, 1, 64]


def test_dropless_blocks_move_no_tokens():
    program = program_of("layers=1,capacity=none,dispatch=sort", "data:4", "batch:data")
    assert {c.kind for c in program.collectives} == {"all_reduce"}


@pytest.mark.parametrize("name", ["mixtral_mini", "t5_mini", "bert_mini"])
@pytest.mark.parametrize(
    ("dispatch", "queues"), [("dispatch=einsum", 4), ("dispatch=sort,expert_peers=2", 2)]
)
def test_dropped_choices_are_a_metric(name, dispatch, queues):
    """A capacity of one slot for each queue drops what is behind the first choice in it."""
    overrides = "layers=2,embed=16,heads=2,d_ff=16,vocab=300,experts=4,experts_per_token=2"
    kv_heads = ",kv_heads=2" if name == "mixtral_mini" else ""
    model = models.load(name, f"{overrides}{kv_heads},capacity=0.01,report_dropped=true,{dispatch}")
    recipe = Recipe(model.init, model.loss, AdamW(1e-3))
    state = md.jit(recipe.create_state(), backend="numpy")(md.random.key(0))
    tokens = md.named(np.random.default_rng(0).integers(0, 32, (2, 16)), ["batch", "length"])
    batch = {name: md.cast(tokens, "int32") for name in model.batch_spec(2, 16)}
    _, metrics = md.jit(recipe.train_step(), backend="numpy")(state, batch)
    choices = 2 * (8 if name == "t5_mini" else 16)  # t5 halves the text
    dropped = float(metrics["dropped_choices"])
    assert 1 - queues / choices <= dropped <= 1 - 1 / choices
