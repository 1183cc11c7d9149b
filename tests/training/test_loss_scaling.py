"""Loss scaling: the rule against Megatron-LM's, and steps in half precision on any layout."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, Sgd
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.state import TrainState, create
from meshdsl.training.step import make_train_step
from tests.training import classifier

HALF = md.Policy(compute="float16")
MESHES = [("numpy", classifier.LAYOUTS[2]), ("jax", classifier.LAYOUTS[3])]


class Rule:
    """The rule in plain Python, as in megatron/core/optimizer/grad_scaler.py."""

    def __init__(self, initial, minimum, growth, backoff, interval, hysteresis):
        self.scale, self.minimum = initial, minimum
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.hysteresis = self.left = hysteresis
        self.tracker = 0

    def update(self, found_inf):
        if found_inf:
            self.tracker = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * self.backoff, self.minimum)
            return
        self.tracker += 1
        if self.tracker == self.interval:
            self.tracker = 0
            self.left = self.hysteresis
            self.scale = self.scale * self.growth


@pytest.mark.parametrize(
    ("interval", "hysteresis", "minimum", "growth", "backoff"),
    [(3, 2, 1.0, 2.0, 0.5), (1, 1, 8.0, 2.0, 0.5), (5, 3, 0.25, 4.0, 0.125), (2, 4, 1.0, 2.0, 0.5)],
)
def test_the_scale_follows_megatron_lm(interval, hysteresis, minimum, growth, backoff):
    ours = LossScaling(64.0, interval, hysteresis, minimum, growth, backoff)
    rule = Rule(64.0, minimum, growth, backoff, interval, hysteresis)
    state = md.jit(lambda: ours.init(), backend="numpy")()
    update = md.jit(lambda state, finite: ours.update(state, finite), backend="numpy")
    rng = np.random.default_rng(interval)
    scales = set()
    for share, count in ((0.9, 15), (0.3, 15), (0.8, 15), (0.0, 30), (1.0, 15)):
        for finite in rng.random(count) < share:
            state = update(state, md.named(finite, []))
            rule.update(not finite)
            assert float(state.scale) == rule.scale
            scales.add(rule.scale)
    assert len(scales) > 3 and minimum in scales


def test_a_constant_scale_stays_and_has_nothing_lower_to_try():
    scaling = LossScaling.constant(1024.0)

    def after(finite):
        state = scaling.update(scaling.init(), finite)
        return state.scale, scaling.can_fall(state)

    for finite in (True, False):
        scale, can_fall = md.jit(after, backend="numpy")(md.named(np.array(finite), []))
        assert (float(scale), bool(can_fall)) == (1024.0, False)


def runs(backend, mesh, layout, scaling, batches, policy=HALF, microbatches=1, optimizer=None):
    """Yields state and metrics after each step."""
    optimizer = optimizer or AdamW(0.05)
    make = create(classifier.init, optimizer, policy, loss_scaling=scaling)
    state = md.jit(make, mesh, layout, backend)(md.random.key(0))
    step = make_train_step(
        classifier.loss, optimizer, 1.0, policy, microbatches, loss_scaling=scaling
    )
    step = md.jit(step, mesh, layout, backend)
    for batch in batches:
        state, metrics = step(state, classifier.named(batch))
        yield state, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_half_precision_overflows_until_the_scale_fits_and_is_skipped_till_then(microbatches):
    scaling = LossScaling(2.0**20, growth_interval=4)
    rule = Rule(2.0**20, 1.0, 2.0, 0.5, 4, 2)
    found = list(
        runs("numpy", None, None, scaling, classifier.batches(14), microbatches=microbatches)
    )
    skipped, before = 0, None
    for number, (state, metrics) in enumerate(found, 1):
        assert metrics["loss_scale"] == rule.scale
        overflows = not np.isfinite(metrics["grad_norm"])
        rule.update(overflows)
        skipped += overflows
        assert (metrics["skipped_steps"], int(state.skipped)) == (skipped, skipped)
        assert (int(state.step), float(state.scaling.scale)) == (number, rule.scale)
        assert metrics["first_nonfinite"] == -1  # a smaller scale is left to try
        if before is not None and overflows:
            for old, new in zip(*(leaves(s) for s in (before, state)), strict=True):
                np.testing.assert_array_equal(new, old)
        before = state
    assert 5 <= skipped <= 9
    assert found[-1][1]["loss"] < found[0][1]["loss"]


def leaves(state: TrainState):
    names = ("w_in", "bias", "w_out")
    trees = (state.params, state.optimizer.mean.params, state.optimizer.mean_square.params)
    return [np.asarray(getattr(tree, name)) for tree in trees for name in names]


@pytest.mark.long
@pytest.mark.parametrize(("backend", "where"), MESHES)
def test_every_layout_skips_the_same_steps(backend, where):
    scaling = LossScaling(2.0**20, growth_interval=4)
    batches = classifier.batches(10)
    expected = list(runs("numpy", None, None, scaling, batches))
    found = list(runs(backend, *where, scaling, batches))
    for (_, metrics), (_, want) in zip(found, expected, strict=True):
        for name in ("loss_scale", "skipped_steps", "first_nonfinite", "learning_rate"):
            assert metrics[name] == want[name]
        np.testing.assert_allclose(metrics["loss"], want["loss"], atol=2e-3)
    for one, other in zip(leaves(found[-1][0]), leaves(expected[-1][0]), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-2)


def test_in_full_precision_scaling_changes_no_number():
    """A power of two is exact: the steps are those without it."""
    optimizer = Sgd(0.2)
    scaled = runs(
        "numpy",
        None,
        None,
        LossScaling(2.0**10),
        classifier.batches(3),
        policy=None,
        optimizer=optimizer,
    )
    state = md.jit(create(classifier.init, optimizer), backend="numpy")(md.random.key(0))
    step = md.jit(make_train_step(classifier.loss, optimizer, 1.0), backend="numpy")
    for batch, (other, found) in zip(classifier.batches(3), scaled, strict=True):
        state, metrics = step(state, classifier.named(batch))
        assert found["loss"] == float(metrics["loss"])
        np.testing.assert_allclose(found["grad_norm"], float(metrics["grad_norm"]), rtol=1e-6)
        for name in ("w_in", "bias", "w_out"):
            one, two = (getattr(s.params, name) for s in (state, other))
            np.testing.assert_allclose(two, one, rtol=1e-6, atol=1e-7)


def test_small_gradients_that_half_precision_loses_are_kept():
    """Gradients near 1e-9 are zero in float16, and not once the loss is scaled."""

    def loss(params, batch):
        return md.mean(params["w"] * batch["x"])

    optimizer = Sgd(1.0)
    batch = {"x": md.named(np.full(8, 1e-7, "f4"), ["batch"])}
    moved = {}
    for scaling in (None, LossScaling(2.0**14)):
        make = create(lambda key: {"w": md.ones([])}, optimizer, loss_scaling=scaling)
        state = md.jit(make, backend="numpy")(md.random.key(0))
        step = make_train_step(loss, optimizer, policy=HALF, loss_scaling=scaling)
        _, metrics = md.jit(step, backend="numpy")(state, batch)
        moved[scaling is not None] = float(metrics["grad_norm"])
    assert moved[False] == 0.0
    np.testing.assert_allclose(moved[True], np.float16(1e-7), rtol=1e-3)


def test_at_the_smallest_scale_what_is_not_finite_is_told():
    poisoned = classifier.batches(1)[0]
    poisoned["image"] = np.where(poisoned["image"] > 1, np.nan, poisoned["image"])
    scaling = LossScaling(4.0, hysteresis=1)
    told = [m["first_nonfinite"] for _, m in runs("numpy", None, None, scaling, [poisoned] * 4)]
    assert told == [-1, -1, 0, 0]
    constant = LossScaling.constant(4.0)
    ((_, metrics),) = runs("numpy", None, None, constant, [poisoned])
    assert metrics["first_nonfinite"] == 0


def test_numbers_out_of_range_are_told_together():
    with pytest.raises(ValueError) as error:
        LossScaling(0.5, growth_interval=0, hysteresis=0, growth=0.5, backoff=2)
    assert str(error.value) == (
        "LossScaling: initial must be in [1.0, 8.51e+37], got 0.5; growth_interval must be in "
        "[1, inf), got 0; hysteresis must be in [1, inf), got 0; growth must be in [1, inf), "
        "got 0.5; backoff must be in (0, 1], got 2"
    )


def test_a_state_that_was_made_for_another_step_is_told():
    optimizer = Sgd(0.1)
    (batch,) = classifier.batches(1)

    def message(scaling_of_state, scaling_of_step):
        make = create(classifier.init, optimizer, loss_scaling=scaling_of_state)
        state = md.jit(make, backend="numpy")(md.random.key(0))
        step = make_train_step(classifier.loss, optimizer, loss_scaling=scaling_of_step)
        with pytest.raises(ValueError) as error:
            md.jit(step, backend="numpy")(state, classifier.named(batch))
        return str(error.value)

    assert message(None, LossScaling()) == (
        "the state has no `skipped`, which this step needs; the state has no `scaling`, which this "
        "step needs. Give `create` the step's skip_nonfinite and loss_scaling"
    )
    assert message(LossScaling(), None).startswith(
        "the state has a field `skipped`, which this step leaves out; the state has a field"
    )


def test_a_scale_grows_no_further_than_its_inverse_is_a_number():
    scaling = LossScaling(2.0**125, growth_interval=1)
    update = md.jit(lambda state: scaling.update(state, md.named(True, [])), backend="numpy")
    state = md.jit(lambda: scaling.init(), backend="numpy")()
    for _ in range(4):
        state = update(state)
    assert float(state.scale) == 2.0**126 and np.finfo(np.float32).tiny <= 1 / 2.0**126
    with pytest.raises(ValueError, match="initial"):
        LossScaling(2.0**127)
