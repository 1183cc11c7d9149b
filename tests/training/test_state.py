"""The train state: its paths, and where its shards are made."""

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, Sgd
from meshdsl.training import spec_of
from meshdsl.training.state import TrainState, create
from tests.training import classifier


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "dims"))


def test_it_starts_at_step_zero_with_the_parameters_of_init():
    state = md.jit(create(classifier.init, Sgd(0.1)))(md.random.key(3))
    assert int(state.step) == 0
    assert state.step.dtype == np.int32
    expected = md.jit(classifier.init)(md.random.key(3))
    np.testing.assert_array_equal(state.params.w_in, expected.w_in)


def test_the_optimizers_tensors_have_the_paths_of_the_parameters():
    graph = md.jit(create(classifier.init, AdamW(0.1))).trace(md.random.key(0))
    names = ["w_in", "bias", "w_out"]
    scopes = ["params", "optimizer/mean/params", "optimizer/mean_square/params"]
    assert list(graph.output_paths) == ["step", *(f"{s}/{n}" for s in scopes for n in names)]


def test_its_spec_is_that_of_the_state_that_is_made():
    made = md.jit(create(classifier.init, AdamW(0.1)))(md.random.key(0))
    spec = spec_of(create(classifier.init, AdamW(0.1)))
    assert isinstance(spec, TrainState)
    assert [(s.dims, s.dtype) for s in leaves(spec)] == [(a.dims, a.dtype) for a in leaves(made)]


def test_every_shard_is_made_on_its_own_device():
    layout = f"{classifier.LAYOUT}; optimizer/pixel:data"
    program = md.jit(create(classifier.init, AdamW(0.1)), "data:2,model:4", layout)
    state = program(md.random.key(0))
    assert state.params.w_in.data.addressable_shards[0].data.shape == (12, 2)
    assert state.optimizer.mean.params.w_in.data.addressable_shards[0].data.shape == (6, 2)
    assert program.lower(md.random.key(0)).collectives == ()


def test_a_rule_for_parameters_holds_for_what_mirrors_them():
    layout = f"{classifier.LAYOUT}; params/pixel:data"
    state = md.jit(create(classifier.init, AdamW(0.1)), "data:2,model:4", layout)(md.random.key(0))
    moments = state.optimizer.mean.params, state.optimizer.mean_square.params
    for tree in (state.params, *moments):
        assert tree.w_in.data.addressable_shards[0].data.shape == (6, 2)


def test_a_policy_says_how_parameters_are_kept():
    policy = md.Policy(params="bfloat16")
    state = spec_of(create(classifier.init, AdamW(0.1), policy))
    assert {leaf.dtype.name for leaf in leaves(state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in leaves(state.optimizer)} == {"float32"}


@pytest.mark.parametrize(("mesh", "layout"), classifier.LAYOUTS)
def test_initial_values_do_not_depend_on_the_layout(mesh, layout):
    state = md.jit(create(classifier.init, Sgd(0.1)), mesh, layout)(md.random.key(5))
    expected = md.jit(classifier.init)(md.random.key(5))
    np.testing.assert_allclose(state.params.w_out, expected.w_out, rtol=1e-6)


@pytest.mark.long
def test_sizes_that_do_not_divide_are_made_with_their_pads():
    where = "data:5", "batch:data; params/pixel:data"
    program = md.jit(create(classifier.init, AdamW(0.1)), *where)
    assert program.lower(md.random.key(0)).collectives == ()
    state = program(md.random.key(0))
    for tree in (state.params, state.optimizer.mean.params):
        assert tree.w_in.dims.sizes == (12, 8)
        assert {shard.data.shape for shard in tree.w_in.data.addressable_shards} == {(3, 8)}
    expected = md.jit(classifier.init)(md.random.key(0))
    np.testing.assert_allclose(state.params.w_in, expected.w_in, rtol=1e-6)
