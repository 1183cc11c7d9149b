"""Bounds hold: no program that lowering makes is faster, or smaller, than they say."""

import numpy as np
import pytest

from meshdsl.layouts.costs import ELEMENTWISE, costs_of
from meshdsl.layouts.hardware import hardware
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.models import load
from meshdsl.search.bounds import Moved
from meshdsl.search.searching import Search
from meshdsl.search.space import Variant
from tests.search.steps import gpt, mlp, step_of


def named(name, batch, length, **rest):
    model = load(name)
    return step_of(model.init, model.loss, model.batch_spec(batch, length), **rest)


# Each with how many of its points are lowered: every one, or one in many.
STEPS = {
    "mlp": (lambda: mlp(64, 256, 4), 1),
    "parts": (lambda: mlp(64, 512, 3, microbatches=(1, 2, 4)), 2),
    "odd parts": (lambda: mlp(27, 512, 3, microbatches=(1, 3)), 2),
    "gpt": (gpt, 12),
    # Its decoder reads fewer tokens than its encoder, which do not look like parts of a batch.
    "t5": (lambda: named("t5_mini", 16, 128, microbatches=(8,)), 24),
    "experts": (lambda: named("mixtral_mini", 16, 128), 40),
    "images": (lambda: named("unet3d_mini", 4, 16), 12),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("hardware", ["v5p", "h100"])
def test_no_program_is_below_its_bounds(name, hardware):
    make, every = STEPS[name]
    step = make()
    search = Search(step, hardware, 4)
    candidates, points, _ = search.candidates()
    assert len(candidates) == points > 5  # all fit
    for row in candidates[::every]:
        row = search.estimated(row)
        point = row.point
        program = search.program(point.mesh, point.layout, point.variant)
        assert step_seconds(program, search.hardware) >= row.bound * 0.999, point
        assert program.peak_bytes >= row.peak * 0.999, point


@pytest.mark.parametrize("name", ["v5p", "h100"])
def test_moving_bytes_never_takes_less_than_its_bound(name):
    costs = costs_of(name).on(hardware(name))
    sizes = np.geomspace(1.0, 1e13, 500)
    seconds = np.array([costs.moved(ELEMENTWISE, size) for size in sizes])
    least = Moved(costs).seconds(sizes)
    assert (least <= seconds * (1 + 1e-12)).all()
    assert (np.diff(least) >= 0).all()
    near = (sizes > 1e4) & (sizes < 1e11)
    assert (least >= 0.9 * seconds)[near].all()  # it is no weak bound


def test_small_images_take_at_least_the_time_of_their_kernels():
    """A convolution net on many devices has many kernels with little to do each."""
    search = Search(named("unet3d_mini", 4, 16), "v5p", 8)
    kernels = sum(row.runs for row in search.bounds(Variant()).facts.work if row.bytes)
    least = search.hardware.latency  # a kernel takes longer than one message
    assert kernels > 100
    assert all(row.bound > kernels * least for row in search.candidates()[0])
