"""Replicas as a layout: what they hold of a state, and that each is counted once."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, Sgd
from meshdsl.optim.adamw import AdamState
from meshdsl.reports.explain import explain
from meshdsl.training import Recipe
from meshdsl.training.checkpointing.blocks import blocks_of
from meshdsl.training.state import by_path, spec_of

BATCH, EMBED, D_FF, LAYERS = md.dims(batch=16, embed=64, d_ff=128, layers=3)
SIZE = 2 * LAYERS.size * EMBED.size * D_FF.size  # the number of parameters
DEVICES = 8


class Layers(md.Module):
    w_in: md.Tensor
    w_out: md.Tensor


def init(key):
    one, two = md.random.split(key, 2)
    return Layers(
        0.3 * md.random.normal(one, [LAYERS, EMBED, D_FF]),
        0.3 * md.random.normal(two, [LAYERS, D_FF, EMBED]),
    )


def loss(params, batch):
    def layer(x, one):
        h = md.relu(md.einsum(x, one.w_in, over="embed"))
        return x + md.einsum(h, one.w_out, over="d_ff"), None

    x, _ = md.scan(layer, batch["x"], params, dim="layers")
    return md.mean(md.square(x))


class WithMaster(md.Module):
    master: md.Tensor
    moments: AdamState


class MasterWeights:
    """AdamW on float32 copies of 16-bit parameters, as in mixed-precision training by others."""

    learning_rate = None

    def init(self, params):
        master = jax.tree.map(lambda p: md.cast(p, "float32"), params)
        return WithMaster(master, AdamW(1e-3).init(master))

    def update(self, grads, state, params, step):
        grads = jax.tree.map(lambda g: md.cast(g, "float32"), grads)
        master, moments = AdamW(1e-3).update(grads, state.moments, state.master, step)
        params = jax.tree.map(lambda m, p: md.cast(m, p.dtype), master, params)
        return params, WithMaster(master, moments)


def step_of(recipe, mesh, layout, backend="jax"):
    return md.jit(recipe.train_step(), mesh, layout, backend)


def bytes_per_parameter(recipe, mesh, layout):
    """Returns those of what stays between steps, and at the peak, without the batch's."""
    jitted = md.jit(recipe.train_step(), mesh, layout, donate="state")
    program = jitted.lower(spec_of(recipe.create_state()), {"x": md.spec([BATCH, EMBED])})
    parts = explain(program).bytes_of
    peak = sum(parts[part] for part in ("parameters", "optimizer", "gradients", "copies"))
    return (parts["parameters"] + parts["optimizer"]) / SIZE, peak / SIZE


ONE = ("data:8", "batch:data; optimizer/embed:data")
TWO = ("replica:2,data:4", "batch:replica+data; optimizer/embed:data")
PLAIN = ("data:8", "batch:data")


@pytest.mark.parametrize(
    ("place", "stored", "published"),
    [
        (PLAIN, 2 + 12, 20),
        (ONE, 2 + 12 / DEVICES, 4 + 16 / DEVICES),
        (TWO, 2 + 24 / DEVICES, 4 + 32 / DEVICES),
    ],
    ids=["replicated", "one holder", "two holders"],
)
def test_the_replica_optimizer_holds_what_is_published_of_it(place, stored, published):
    """Published: 16-bit parameters and gradients, a float32 gradient, moments and a master weight.

    Between steps there are no gradients. A step holds fewer of them at once than all.
    """
    recipe = Recipe(init, loss, MasterWeights(), policy="params=bfloat16,compute=bfloat16")
    found, peak = bytes_per_parameter(recipe, *place)
    assert found == pytest.approx(stored, rel=1e-4)
    assert peak <= published


@pytest.mark.parametrize(
    ("place", "stored"),
    [(PLAIN, 4 + 8), (ONE, 4 + 8 / DEVICES), (TWO, 4 + 16 / DEVICES)],
    ids=["replicated", "one holder", "two holders"],
)
def test_adamw_holds_float32_parameters_and_two_moments(place, stored):
    recipe = Recipe(init, loss, AdamW(1e-3), policy="params=float32,compute=bfloat16")
    assert bytes_per_parameter(recipe, *place)[0] == pytest.approx(stored, rel=1e-4)


def test_two_holders_of_everything_hold_two_shares():
    recipe = Recipe(init, loss, AdamW(1e-3))
    layout = "batch:replica+data; params/embed:data"
    found, _ = bytes_per_parameter(recipe, TWO[0], layout)
    assert found == pytest.approx(2 * 12 / DEVICES, rel=1e-4)


LAYOUTS = [
    "batch:replica+data; optimizer/embed:data",
    "batch:replica+data; params/embed:data",
    "batch:data; params/embed:data",  # replicas compute the same
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_norms_and_clipped_updates_count_each_replica_once(layout, backend):
    extra = ("params_norm", "num_zeros")
    recipe = Recipe(init, loss, Sgd(1.0, momentum=0.9), clip_norm=1.0, extra_metrics=extra)
    state = jax.tree.map(
        lambda one: md.named(np.asarray(one), one.dims),
        md.jit(recipe.create_state())(md.random.key(0)),
        is_leaf=lambda one: isinstance(one, md.NamedArray),
    )
    x = np.random.default_rng(0).standard_normal((BATCH.size, EMBED.size)).astype(np.float32)
    batch = {"x": md.named(x, [BATCH, EMBED])}
    expected = step_of(recipe, None, None, "numpy")(state, batch)
    found = step_of(recipe, "replica:2,data:2", layout, backend)(state, batch)
    assert np.asarray(expected.metrics["grad_norm"]) > 2  # it is clipped
    for name in ("loss", "grad_norm", "params_norm"):
        wanted = np.asarray(expected.metrics[name])
        np.testing.assert_allclose(np.asarray(found.metrics[name]), wanted, rtol=1e-5)
    wanted = np.asarray(expected.metrics["num_zeros"])
    np.testing.assert_array_equal(np.asarray(found.metrics["num_zeros"]), wanted)
    before, after = by_path(state), by_path(found.state)
    changes = {}
    for path, array in by_path(expected.state).items():
        start = np.asarray(before[path], np.float64)
        wanted, change = np.asarray(array) - start, np.asarray(after[path]) - start
        np.testing.assert_allclose(change, wanted, atol=1e-5 * np.abs(wanted).max() + 1e-7)
        changes[path] = np.sum(np.square(change))
    moved = sum(change for path, change in changes.items() if path.startswith("params/"))
    assert np.sqrt(moved) == pytest.approx(1, rel=1e-4)  # the norm that gradients are clipped to


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", ["batch:replica+data", "batch:data", "length:data", ""])
def test_checksums_count_each_replica_once(layout, backend):
    tokens = np.random.default_rng(0).integers(0, 2**32, (16, 32), np.uint32)
    total = md.jit(lambda x: md.sum(x), "replica:2,data:2", layout, backend)
    found = np.asarray(total(md.named(tokens, md.dims(batch=16, length=32))))
    assert int(found) == int(tokens.sum(dtype=np.uint32))


def test_a_checkpoint_has_each_shard_once():
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    place = md.jit(lambda x: x + 1.0, "replica:2,data:4", "embed:data")
    placed = place(md.named(array, md.dims(embed=8, batch=4)))
    blocks, regions = blocks_of({"x": placed.data})
    assert len(placed.data.addressable_shards) == 8
    assert sum(block.nbytes for block in blocks.values()) == array.nbytes
    assert len(regions["x"]) == 4
    np.testing.assert_array_equal(np.concatenate([*blocks.values()]), array + 1)
