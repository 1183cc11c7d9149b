"""Steps whose gradients are not finite: skipped, and told by parameter, on any layout."""

import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, schedules
from meshdsl.optim.clipping import global_norm
from meshdsl.training.nonfinite import culprit, gradient_paths, squared_norms
from meshdsl.training.state import create, spec_of
from meshdsl.training.step import make_train_step
from tests.training import classifier

NAMES = ("w_in", "bias", "w_out")
DIMS = {**classifier.BATCH_DIMS, "poison": []}


def loss(params, batch):
    """The classifier's loss; a poison other than 0 comes into the gradient of w_out alone."""
    return classifier.loss(params, batch) + md.sum(params.w_out) * batch["poison"]


def poisoned(values):
    return [
        {**batch, "poison": np.float32(value)}
        for batch, value in zip(classifier.batches(len(values)), values, strict=True)
    ]


def named(batch):
    return {name: md.named(array, DIMS[name]) for name, array in batch.items()}


def run(batches, where=(None, None), backend="numpy", microbatches=1):
    optimizer = AdamW(schedules.linear(0.1, 0.0, 10), weight_decay=0.1)
    make = create(classifier.init, optimizer, skip_nonfinite=True)
    state = md.jit(make, *where, backend)(md.random.key(0))
    step = make_train_step(loss, optimizer, 1.0, microbatches=microbatches, skip_nonfinite=True)
    step = md.jit(step, *where, backend)
    found = []
    for batch in batches:
        state, metrics = step(state, named(batch))
        found.append({name: float(value) for name, value in metrics.items()})
    return state, found


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e25])
def test_a_skipped_step_is_as_if_its_batch_had_never_been(poison):
    """1e25 is finite, but its square is not."""
    batches = poisoned([0, 0, poison, 0])
    state, metrics = run(batches)
    without, expected = run([batches[0], batches[1], batches[3]])
    assert metrics[3] == expected[2] | {"skipped_steps": 1}  # the learning rate too
    for name in NAMES:
        for tree in ("params", "optimizer.mean.params", "optimizer.mean_square.params"):
            one, two = (np.asarray(attribute(s, f"{tree}.{name}")) for s in (state, without))
            np.testing.assert_array_equal(one, two)
    assert [int(n) for n in (state.step, state.skipped, state.updates)] == [4, 1, 3]
    assert [m["skipped_steps"] for m in metrics] == [0, 0, 1, 1]


def attribute(tree, path):
    for name in path.split("."):
        tree = getattr(tree, name)
    return tree


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "backend", "microbatches"),
    [
        *((where, "numpy", count) for where in classifier.LAYOUTS[1:] for count in (1, 2)),
        (classifier.LAYOUTS[3], "jax", 1),
    ],
)
def test_the_parameter_is_told_on_every_layout(where, backend, microbatches):
    state, metrics = run(poisoned([0, np.nan, 0]), where, backend, microbatches)
    assert [m["first_nonfinite"] for m in metrics] == [-1, 2, -1]
    assert gradient_paths(state.params)[2] == "w_out"
    assert int(state.skipped) == 1
    assert all(np.isfinite(getattr(state.params, name)).all() for name in NAMES)


@pytest.mark.long
def test_skipping_is_what_optax_does():
    batches = poisoned([0, np.inf, 0, np.nan, 0])
    state, _ = run(batches)
    rate = optax.linear_schedule(0.1, 0.0, 10)
    mask = {"w_in": True, "bias": False, "w_out": True}
    transform = optax.apply_if_finite(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(rate, weight_decay=0.1, mask=mask),
        ),
        max_consecutive_errors=5,
    )
    initial = md.jit(classifier.init, backend="numpy")(md.random.key(0))
    weights = {name: np.asarray(getattr(initial, name), "f4") for name in NAMES}
    held = transform.init(weights)
    for batch in batches:
        _, grads = classifier.numpy_loss_and_grads(*(weights[n] for n in NAMES), batch)
        grads = dict(zip(NAMES, (g.astype("f4") for g in grads), strict=True))
        grads["w_out"] = grads["w_out"] + batch["poison"]
        updates, held = transform.update(grads, held, weights)
        weights = {n: np.asarray(w) for n, w in optax.apply_updates(weights, updates).items()}
    for name in NAMES:
        np.testing.assert_allclose(getattr(state.params, name), weights[name], atol=2e-5)


def test_a_loss_that_is_not_finite_by_itself_is_told_apart():
    def infinite(params, batch):
        return classifier.loss(params, batch) + batch["poison"]

    optimizer = AdamW(0.1)
    make = create(classifier.init, optimizer, skip_nonfinite=True)
    state = md.jit(make, backend="numpy")(md.random.key(0))
    step = md.jit(make_train_step(infinite, optimizer, skip_nonfinite=True), backend="numpy")
    state, metrics = step(state, named(poisoned([np.inf])[0]))
    assert (float(metrics["first_nonfinite"]), int(state.skipped)) == (3, 1)
    paths = gradient_paths(state.params)
    assert culprit(3, paths) == "the loss, or the norm of all gradients together, is not finite"
    assert culprit(1, paths) == "the gradient of bias is not finite"


@pytest.mark.parametrize("where", classifier.LAYOUTS[1:])
def test_devices_add_one_small_vector_up(where):
    """On one axis it takes the place of the norm's scalar: not one collective more."""
    optimizer = AdamW(0.1)

    def collectives(guarded):
        step = make_train_step(classifier.loss, optimizer, 1.0, skip_nonfinite=guarded)
        state = spec_of(create(classifier.init, optimizer, skip_nonfinite=guarded))
        return md.jit(step, *where).lower(state, classifier.BATCH).collectives

    plain, guarded = collectives(False), collectives(True)
    assert [c.kind for c in guarded] == [c.kind for c in plain]
    more = sum(c.payload_bytes for c in guarded) - sum(c.payload_bytes for c in plain)
    assert 0 <= more <= 4 * (len(NAMES) - 1)


@pytest.mark.parametrize(
    "where", [(None, None), ("a:2,b:2", "hidden:b"), ("a:2,b:2", "hidden:b; params/pixel:a")]
)
def test_the_squares_are_those_of_each_gradient(where):
    rng = np.random.default_rng(0)
    shapes = {"a": [classifier.pixel, classifier.hidden], "b": [classifier.hidden], "c": []}
    tree = {
        name: md.named(rng.normal(size=[d.size for d in dims]).astype("f4"), dims)
        for name, dims in shapes.items()
    }

    def squares(params):
        return squared_norms(params), global_norm(params)

    found, norm = md.jit(squares, *where, "numpy")(tree)
    expected = [np.sum(np.asarray(leaf, "f8") ** 2) for leaf in tree.values()]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(float(norm) ** 2, sum(expected), rtol=1e-5)


def test_only_parameters_with_gradients_are_counted():
    tree = {"table": md.spec([classifier.label], "int32"), "w": [md.spec([]), md.spec([])]}
    assert gradient_paths(tree) == ["w/0", "w/1"]
