"""Half precision with master weights in float32: the dtypes of what is moved, added up and kept."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.lowering.options import Options
from meshdsl.optim import AdamW, Sgd
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.training import classifier

LAYERS = 3
SMALL = f"layers={LAYERS},embed=64,heads=4,d_ff=128,vocab=64"
FSDP = "batch:data; params/embed:data"
WEIGHTS = 4 * 64 * 64 + 2 * 64 * 128  # of a layer


def moved(kind, compute, weights, microbatches=1):
    """Returns the bytes of the layers' weights or gradients that one step moves, and how often."""
    model = models.load("gpt_mini", f"{SMALL},policy.compute={compute}")
    optimizer = AdamW(0.1)
    step = make_train_step(model.loss, optimizer, 1.0, microbatches=microbatches)
    options = Options(weights=weights, bucket_bytes=0)
    jitted = md.jit(step, "data:4", FSDP, donate="state", options=options)
    program = jitted.lower(spec_of(create(model.init, optimizer)), model.batch_spec(16, 16))
    found = [
        (c.payload_bytes, c.count)
        for c in program.collectives
        if c.kind == kind and {"embed"} < {*c.dims.names} & {"embed", "heads", "d_ff"}
    ]
    return sum(size * count for size, count in found), {count for _, count in found}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_parameters_are_cast_before_they_are_gathered(compute, microbatches):
    """Once in the forward pass and once in the backward pass, or once for all."""
    one = 2 * LAYERS * WEIGHTS
    assert moved("all_gather", compute, "again", microbatches) == (
        2 * microbatches * one,
        {microbatches * LAYERS},
    )
    assert moved("all_gather", compute, "keep", microbatches) == (one, {1})
    assert moved("all_gather", "float32", "keep", microbatches) == (2 * one, {1})


def test_a_policy_of_the_step_casts_before_it_gathers_too():
    optimizer = Sgd(0.1)

    def gathered(policy):
        step = make_train_step(classifier.loss, optimizer, policy=policy)
        state = spec_of(create(classifier.init, optimizer, policy))
        layout = "batch:data; params/pixel:data"
        options = Options(weights="keep", bucket_bytes=0)
        program = md.jit(step, "data:4", layout, options=options).lower(state, classifier.BATCH)
        return sum(c.payload_bytes for c in program.collectives if c.kind == "all_gather")

    assert gathered(md.Policy(compute="bfloat16")) == 2 * 12 * 8
    assert gathered(md.Policy()) == 4 * 12 * 8


def test_gradients_of_microbatches_are_added_up_and_reduced_in_float32():
    total = 4 * LAYERS * WEIGHTS
    assert moved("reduce_scatter", "bfloat16", "keep", 4) == (total, {1})
    # Without microbatches each is reduced where it is made, in the dtype that it is made in.
    assert moved("reduce_scatter", "bfloat16", "keep", 1) == (total / 2, {LAYERS})


def test_updates_too_small_for_half_precision_reach_the_master_weights():
    """1 - 2**-10 is 1 in bfloat16, so without master weights nothing would move."""
    optimizer = Sgd(2.0**-10)
    batch = {"x": md.named(np.ones(32, "f4"), ["batch"])}
    found = {}
    for text in ("compute=bfloat16", "bfloat16"):
        policy = md.Policy.parse(text)
        make = create(lambda key: {"w": md.ones([])}, optimizer, policy)
        state = md.jit(make, backend="numpy")(md.random.key(0))
        step = md.jit(make_train_step(mean_of, optimizer, policy=policy), backend="numpy")
        for _ in range(64):
            state, _ = step(state, batch)
        found[text] = state.params["w"].dtype.name, float(state.params["w"])
    assert found == {
        "compute=bfloat16": ("float32", 1 - 64 * 2.0**-10),
        "bfloat16": ("bfloat16", 1.0),
    }


def mean_of(params, batch):
    return md.mean(params["w"] * batch["x"])


@pytest.mark.parametrize(
    ("where", "microbatches"), [((None, None), 32), (("data:2", "batch:data"), 16)]
)
def test_small_gradients_of_microbatches_are_not_lost_beside_a_large_one(where, microbatches):
    """256 + 31 x 0.5 stays 256 in bfloat16; each device has one row of a microbatch."""
    summands = np.full(32, 0.5, "f4")
    summands[0] = 256

    policy, optimizer = md.Policy(compute="bfloat16"), Sgd(1.0)
    state = md.jit(create(lambda key: {"w": md.zeros([])}, optimizer, policy), *where, "numpy")(
        md.random.key(0)
    )
    step = make_train_step(mean_of, optimizer, policy=policy, microbatches=microbatches)
    batch = {"x": md.named(summands, ["batch"])}
    state, _ = md.jit(step, *where, "numpy")(state, batch)
    assert float(state.params["w"]) == -summands.mean()


def test_parameters_moments_and_gradients_are_float32_whatever_is_computed_in():
    model = models.load("gpt_mini", f"{SMALL},policy.compute=bfloat16")
    optimizer = AdamW(0.1)
    state = spec_of(create(model.init, optimizer))
    step = make_train_step(model.loss, optimizer)
    graph = md.jit(step).trace(state, model.batch_spec(4, 8))
    out = {path: t.dtype.name for path, t in zip(graph.output_paths, graph.outputs, strict=True)}
    kept = [dtype for path, dtype in out.items() if "params/" in path]
    assert len(kept) == 3 * 10 and set(kept) == {"float32"}
