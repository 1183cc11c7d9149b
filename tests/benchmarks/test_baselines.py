"""The hand-written programs compute what our pairs compute: loss, gradients and parameters."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.jax.torus import arrange_devices
from meshdsl.models.own import attribute_of
from meshdsl.training.state import by_path
from tests.benchmarks.baselines.table import BASELINES
from tests.benchmarks.gspmd_time import random_batch
from tests.benchmarks.pairs import initial, jitted

CLASSES = 3  # the fewest that a model has
SQUARES = 1e-4  # where running means of squares begin: updates are smooth in the gradients then
CLOSE = 1e-4


def name_of(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def numbers(tree):
    """Returns the arrays of one of our trees by their paths, in float64."""
    return {path: np.asarray(one.data, np.float64) for path, one in by_path(tree).items()}


def their_numbers(tree):
    """Returns the arrays of a tree of dicts and lists by their paths."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {name_of(path): np.asarray(leaf, np.float64) for path, leaf in found}


def started(pair):
    """Returns our state to start from."""
    return started_from(initial(pair))


def started_from(state):
    """Returns our state with other means of squares, if there are any."""
    if not hasattr(state.optimizer, "mean_square"):
        return state
    squares = jax.tree.map(lambda x: np.asarray(x) + np.float32(SQUARES), state.optimizer)
    return state.replace(optimizer=state.optimizer.replace(mean_square=squares.mean_square))


def copied(like, params):
    """Returns the state of a hand-written program that begins as ours."""

    def value(path, leaf):
        name = name_of(path)
        if name.startswith("params/"):
            start = params[name.removeprefix("params/")]
        else:
            start = SQUARES if "/nu/" in name else 0
        full = np.broadcast_to(np.asarray(start, leaf.dtype), leaf.shape)
        return jax.device_put(full, leaf.sharding)

    return jax.tree_util.tree_map_with_path(value, like)


def batch_of(specs):
    """Returns a random batch whose labels are classes."""
    batch = random_batch(specs)
    if "label" in batch:
        batch["label"] = md.named(batch["label"].data % CLASSES, batch["label"].dims)
    return batch


def assert_close(ours, theirs):
    """Compares arrays by their paths, relative to the largest number of each."""
    assert ours.keys() == theirs.keys()
    largest = max(np.abs(one).max() for one in ours.values())
    for path, one in ours.items():
        # Some gradients are zeros but for rounding: those of the biases of keys.
        unit = max(np.abs(one).max(), CLOSE * largest)
        assert np.abs(one - theirs[path]).max() <= CLOSE * unit, path


QUICK = ("mlp_fsdp_tensor", "long_context_fsdp")  # the others take ten to twenty seconds each


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BASELINES],
)
def test_a_hand_written_program_takes_the_same_step(name):
    baseline = BASELINES[name]
    function, (_, batch_spec) = jitted(baseline.pair, "small")
    state, batch = started(baseline.pair), batch_of(batch_spec)
    mesh = arrange_devices(Mesh.parse(baseline.pair.mesh("small")), jax.devices()[:8])
    program, like, batch_like = baseline.program(mesh, "small")
    before = numbers(state.params)
    theirs = copied(like, before)
    their_batch = {
        part: jax.device_put(np.asarray(batch[part].data), leaf.sharding)
        for part, leaf in batch_like.items()
    }
    state, metrics = function(state, batch)
    theirs, their_metrics = program(theirs, their_batch)
    np.testing.assert_allclose(metrics["loss"].data, their_metrics["loss"], rtol=CLOSE)
    after, their_after = numbers(state.params), their_numbers(theirs["params"])
    assert_close(after, their_after)
    if "optimizer" in theirs:  # its first moments are the gradients, but for a factor
        moments = numbers(state.optimizer.mean.params)
        assert_close(moments, their_numbers(theirs["optimizer"][0].mu))
    else:
        changes = {path: after[path] - before[path] for path in after}
        assert_close(changes, {path: their_after[path] - before[path] for path in after})


def test_they_are_ten_and_the_command_line_can_name_each():
    assert len(BASELINES) == 10
    for baseline in BASELINES.values():
        assert attribute_of(baseline.against).__name__ == baseline.pair.name
