"""The global norm, and clipping by it, against optax's."""

import jax
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.optim import clip_by_global_norm, global_norm
from meshdsl.tensors import dtypes
from tests.optim import trees


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_norm_is_that_of_optax(dtype, sharded):
    grads = trees.tree(3, dtype)
    norm = md.jit(global_norm, *(trees.SHARDED if sharded else ()))(grads)
    assert norm.dtype == dtype
    np.testing.assert_allclose(float(norm), optax.tree.norm(trees.arrays(grads)), rtol=1e-6)


def test_the_norm_of_split_tensors_reduces_one_scalar_over_each_axis():
    found = trees.collectives(global_norm, trees.tree(3))
    assert all((kind, size) == ("all_reduce", 4) for kind, _, size in found)
    assert sorted(axis for _, axes, _ in found for axis in axes) == ["data", "model"]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_that_of_optax(max_norm):
    grads = trees.tree(3)
    found, _ = md.jit(lambda g: clip_by_global_norm(g, max_norm))(grads)
    expected, _ = optax.clip_by_global_norm(max_norm).update(trees.arrays(grads), None)
    trees.assert_close(found, expected, 1e-6)


def test_below_the_limit_nothing_changes_at_all():
    grads = trees.tree(3)
    found, _ = md.jit(lambda g: clip_by_global_norm(g, 1e6))(grads)
    jax.tree.map(np.testing.assert_array_equal, trees.arrays(found), trees.arrays(grads))


@pytest.mark.long
def test_zero_gradients_stay_zero():
    grads = jax.tree.map(lambda a: 0 * a, trees.tree(3))
    found, norm = md.jit(lambda g: clip_by_global_norm(g, 1.0))(grads)
    assert float(norm) == 0
    assert all((a == 0).all() for a in jax.tree.leaves(trees.arrays(found)))


def test_narrow_gradients_are_summed_in_float32():
    grads = {"x": md.named(np.full(4096, 0.1, dtypes.BFLOAT16), ["i"])}
    norm = md.jit(global_norm)(grads)
    assert norm.dtype == np.float32
    np.testing.assert_allclose(float(norm), 6.4, rtol=2e-3)


def test_the_limit_must_be_positive():
    with pytest.raises(ValueError, match=r"^clip_by_global_norm: max_norm must be above 0, got 0$"):
        md.jit(lambda g: clip_by_global_norm(g, 0))(trees.tree(3))
