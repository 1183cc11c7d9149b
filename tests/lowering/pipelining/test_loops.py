"""A step as a pipeline has the numbers of the step on one device, and as many ticks as planned."""

import pytest

from meshdsl.reports.explain.explanation import explain
from meshdsl.reports.explain.pipeline import facts_of
from tests.lowering.pipelining.steps import (
    DENSE_FIRST,
    EXPERTS,
    GPT,
    KINDS,
    LLAMA,
    T5,
    check_same,
    layers,
    lower,
)

NARROW = "gpt_mini", "layers=4,embed=8,heads=2,d_ff=16,vocab=32"
WIDE = "gpt_mini", "layers=8,embed=64,heads=2,d_ff=128,vocab=64"
TENSOR = "layers:pipe; batch:data; heads:model; d_ff:model; vocab:model+pipe; length:model?"
STORED = "layers:pipe; batch:data; params/embed:data; optimizer/embed:data; vocab:pipe"


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "microbatches", "mesh", "layout", "rounds"),
    [
        (GPT, 4, "pipe:2", "layers:pipe", 1),
        (GPT, 8, "pipe:4", "layers:pipe", 1),
        (GPT, 2, "pipe:4", "layers:pipe", 1),  # fewer microbatches than stages
        (GPT, 8, "pipe:2", "layers:pipe", 2),
        (layers(GPT, 8), 4, "pipe:2", "layers:pipe", 4),
        (layers(GPT, 8), 4, "pipe:4", "layers:pipe", 2),
        (layers(GPT, 8), 8, "pipe:8", "layers:pipe", 1),
        (layers(GPT, 5), 4, "pipe:2", "layers:pipe", 1),  # layers that do not divide
        (layers(GPT, 7), 4, "pipe:2", "layers:pipe", 2),
        (layers(GPT, 9), 4, "pipe:4", "layers:pipe", 2),
        (GPT, 4, "pipe:2", "layers:pipe; vocab:pipe", 1),
        (GPT, 4, "a:2,b:2", "layers:a+b", 1),
        (GPT, 4, "pipe:2,data:2,model:2", TENSOR, 1),
        (GPT, 4, "pipe:2,data:2,model:2", TENSOR, 2),
        (GPT, 4, "pipe:2,data:2", STORED, 1),
        (GPT, 4, "pipe:2,data:2", STORED, 2),
        (GPT, 4, "pipe@dcn:2,data:2", "layers:pipe; batch:data", 1),
        (LLAMA, 4, "pipe:2,model:2", "layers:pipe; heads:model; vocab:model+pipe", 1),
        (LLAMA, 4, "pipe:2,context:2", "layers:pipe; length:context; memory_length:context", 1),
        (EXPERTS, 4, "pipe:2,expert:2", "layers:pipe; experts:expert", 1),
        (EXPERTS, 4, "pipe:2,expert:2", "layers:pipe; experts:expert", 2),
        (DENSE_FIRST, 4, "pipe:2,data:2", "layers:pipe; batch:data", 1),
        (T5, 5, "pipe:2", "layers:pipe", 1),  # two stacks, one after the other
        (T5, 5, "pipe:2", "layers:pipe", 2),
        (T5, 4, "pipe:4,data:2", STORED, 1),
        (KINDS, 5, "pipe:4", "layers:pipe", 1),  # 3 dense layers, then 4 with experts
        (KINDS, 4, "pipe:2", "layers:pipe", 2),
    ],
    ids=str,
)
def test_a_pipeline_has_the_numbers_of_one_device(model, microbatches, mesh, layout, rounds):
    check_same(model, microbatches, mesh, layout, pipeline_rounds=rounds)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_activations_may_be_computed_again(remat):
    model = GPT[0], f"{GPT[1]},remat={remat}"
    check_same(model, 4, "pipe:2,model:2", "layers:pipe; heads:model", pipeline_rounds=2)


@pytest.mark.parametrize("schedule", ["circular", "gpipe", "1f1b", "zb-h1", "interleaved", "zbv"])
def test_every_schedule_has_the_same_numbers(schedule):
    rounds = 2 if schedule in ("interleaved", "zbv") else 1
    check_same(GPT, 4, "pipe:2", "layers:pipe", pipeline=schedule, pipeline_rounds=rounds)


@pytest.mark.parametrize(
    ("model", "mesh", "layout", "rounds"),
    [
        (layers(GPT, 5), "pipe:2,data:2,model:2", TENSOR, 2),
        pytest.param(
            EXPERTS, "pipe:2,expert:2", "layers:pipe; experts:expert", 2, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_jax_runs_what_numpy_simulates(model, mesh, layout, rounds):
    check_same(model, 4, mesh, layout, "jax", pipeline_rounds=rounds)


@pytest.mark.long
def test_jax_runs_rounds_that_turn_around():
    check_same(NARROW, 4, "pipe:2", "layers:pipe", "jax", pipeline="zbv")


@pytest.mark.parametrize("weights", ["auto", "keep", "again"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_weights_are_gathered_once_per_step_or_in_each_pass(weights, rounds):
    """The latter in each tick: for each layer, or for the layers of a chunk."""
    how = ("pipe:2,data:2", "layers:pipe; batch:data; params/embed:data; optimizer/embed:data")
    check_same(GPT, 4, *how, weights=weights, pipeline_rounds=rounds)
    program = lower(GPT, 4, *how, weights=weights, pipeline_rounds=rounds)
    most = max(c.count for c in program.collectives if c.kind == "all_gather")
    ticks = 4 * rounds + 1  # of the forward passes, and of the backward passes
    layers_in_turn = 2 if rounds == 1 else 1  # whose weights are gathered one after another
    assert most == (1 if weights != "again" else (ticks - 2 * rounds + 1) * layers_in_turn)


def test_little_memory_gathers_the_weights_of_stages_again():
    layout = "layers:pipe; batch:data; params/embed:data; optimizer/embed:data"
    usual = lower(GPT, 4, "pipe:2,data:2", layout)
    again = lower(GPT, 4, "pipe:2,data:2", layout, weights="again")
    assert again.peak_bytes < usual.peak_bytes
    limited = lower(GPT, 4, "pipe:2,data:2", layout, memory=again.peak_bytes)
    assert limited.peak_bytes <= again.peak_bytes


def test_layers_that_others_store_come_to_their_stages():
    """An axis may store layers whose stages another axis of the same size numbers."""
    check_same(GPT, 4, "pipe:2,data:2", "layers:pipe; params/layers:data", pipeline_rounds=2)


@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("microbatches", [4, 5, 6, 8, 16])
def test_the_program_runs_as_many_ticks_as_planned(stages, rounds, microbatches):
    program = lower(
        layers(NARROW, 8), microbatches, f"pipe:{stages}", "layers:pipe", pipeline_rounds=rounds
    )
    pipeline = program.pipeline
    work = rounds * microbatches
    loops = [i for i in program.block.instructions if i.op == "scan" and i.params["dim"] == "tick"]
    groups = microbatches // stages
    delay = (rounds - 1) * max(stages, -(-microbatches // groups)) + stages - 1
    ticks = [delay, work + stages - 1 - delay, delay]
    assert [loop.runs for loop in loops] == [n for n in ticks if n]
    assert pipeline.forward_ticks == pipeline.backward_ticks == work + stages - 1
    bubble = (stages - 1) / (work + stages - 1)
    assert pipeline.bubble == pytest.approx(bubble)
    assert f"bubble {bubble:.1%} of them" in " ".join(facts_of(explain(program).pipeline))


@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (4, 2)])
def test_memory_does_not_grow_with_microbatches(stages, rounds):
    """Only the batch grows, by the tokens of its microbatches."""

    def peak(microbatches):
        return lower(
            WIDE, microbatches, f"pipe:{stages}", "layers:pipe", 2 * microbatches,
            pipeline_rounds=rounds,
        ).peak_bytes  # fmt: skip

    assert peak(64) == pytest.approx(peak(16), rel=0.05)


def test_a_program_grows_neither_with_microbatches_nor_with_layers():
    def size(count, microbatches):
        program = lower(layers(GPT, count), microbatches, "pipe:2", "layers:pipe", batch=64)
        return sum(1 for _ in program.block.walk())

    assert size(4, 8) == size(4, 64) == size(16, 8)


def test_activations_kept_do_not_grow_with_microbatches():
    def buffers(microbatches):
        program = lower(GPT, microbatches, "pipe:2", "layers:pipe", batch=2 * microbatches)
        return {v.shape.get("kept").size for i, _ in program.block.walk() for v in i.outputs
                if v.shape.find("kept") is not None}  # fmt: skip

    assert buffers(8) == buffers(32) == {3}


def test_stages_send_activations_and_nothing_else_in_their_loops():
    program = lower(layers(GPT, 8), 8, "pipe:4", "layers:pipe")
    sent = [(c.kind, c.count) for c in program.collectives if c.axes == ("pipe",) and c.dims]
    # x by 3 + 8 ticks, its gradient by 8 + 3; what leaves the last stage; the embedding's gradient.
    assert sorted(sent) == sorted(
        [("permute", 3), ("permute", 8), ("permute", 8), ("permute", 3), ("all_reduce", 8),
         ("all_reduce", 1)]
    )  # fmt: skip


def test_stages_are_sent_their_layers_once_and_no_zeros():
    """Of 2 stages and 2 rounds, each stores a chunk that the other one computes."""
    program = lower(GPT, 4, "pipe:2", "layers:pipe", pipeline_rounds=2)
    dealt = [c for c in program.collectives if c.kind == "permute" and "layers" in c.dims.names]
    layers = sum(v.bytes for v in program.block.inputs if v.shape.find("layers") is not None)
    layers //= 2  # parameters; the other half are the optimizer's
    for backward in (False, True):
        sent = sum(c.payload_bytes * c.count for c in dealt if c.source.backward == backward)
        assert sent == layers // 2
