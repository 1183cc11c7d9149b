"""The fixed problem of `transformer_block`: losses, bytes and collectives on several layouts."""

import pytest

import meshdsl as md
from tests.reference import hlo
from tests.reference import transformer_block as reference

CASES = {
    "data:2,model:4": reference.LAYOUT,
    "data:8": "batch:data",
    "model:8": "heads:model; d_ff:model",
    "data:4,model:2": "batch:data; heads:model; d_ff:model; length:model?",
    "a:2,b:2,c:2": "batch:a+b; heads:c; d_ff:c",
    None: None,
}


def jitted(mesh, **kwargs):
    return md.jit(reference.train_step, mesh=mesh, layout=CASES[mesh], **kwargs)


QUICK = (None, "data:2,model:4", "a:2,b:2,c:2")  # twelve steps take fifteen seconds each


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
@pytest.mark.optimized  # the steps take longer than their compilation
def test_losses_are_the_published_ones_on_every_layout(mesh):
    blocks, x, y = reference.problem()
    step = jitted(mesh, donate="blocks")
    losses = []
    for _ in range(12):
        blocks, loss = step(blocks, x, y)
        losses.append(float(loss))
    assert losses[:5] == pytest.approx(reference.LOSSES, abs=1e-5)
    assert losses[-1] == pytest.approx(reference.LOSS_AT_STEP_12, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [mesh for mesh in CASES if mesh])
def test_program_predicts_every_collective_of_the_compiled_program(mesh):
    step = jitted(mesh)
    program = step.lower(*reference.problem())
    assert hlo.predicted(program) == hlo.collectives(program.compile().as_text())
    assert program.collectives


def test_tensor_and_data_parallel_step_all_reduces_19_mib():
    program = jitted("data:2,model:4").lower(*reference.problem())
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    total = sum(c.payload_bytes * c.count for c in program.collectives)
    assert total / 2**20 <= 19.01
    compiled = hlo.collectives(program.compile().as_text())
    assert compiled.total() == total


def test_megatron_layout_reduces_twice_a_layer_in_each_direction():
    program = jitted("data:2,model:4").lower(*reference.problem())
    per_layer = [c for c in program.collectives if c.axes == ("model",)]
    assert len(per_layer) == 4
    assert {c.count for c in per_layer} == {reference.layers.size}
    assert {c.payload_bytes for c in per_layer} == {8 * 128 * 256 * 4}
