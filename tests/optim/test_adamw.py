"""AdamW, against optax's: the same parameters after several steps, on every layout."""

import jax
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, Excluding, Sgd, is_matrix, schedules
from meshdsl.tensors import dtypes
from tests.optim import trees


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adam_is_that_of_optax(steps, dtype):
    found, _ = trees.run(AdamW(0.01, b2=0.95, eps=1e-6), steps, dtype=dtype)
    expected = trees.run_optax(optax.adam(0.01, b2=0.95, eps=1e-6), steps, dtype)
    trees.assert_close(found, expected, 1e-6)


def test_matrices_decay_and_scales_and_biases_do_not():
    found, _ = trees.run(AdamW(0.01, weight_decay=0.1), 5)
    expected = trees.run_optax(optax.adamw(0.01, weight_decay=0.1, mask=trees.DECAYS), 5)
    trees.assert_close(found, expected, 1e-6)


def test_a_mask_chooses_by_path_and_shape():
    asked = []

    def mask(path, shape):
        asked.append((path, shape.names))
        return path == "scale"

    found, _ = trees.run(AdamW(0.01, weight_decay=0.1, mask=mask), 3)
    chosen = jax.tree.map(lambda _: False, trees.DECAYS) | {"scale": True}
    expected = trees.run_optax(optax.adamw(0.01, weight_decay=0.1, mask=chosen), 3)
    trees.assert_close(found, expected, 1e-6)
    assert ("blocks/query", ("layers", "embed", "heads")) in asked


@pytest.mark.parametrize("patterns", [["blocks/query"], ["query"], ["block*/q*"], ["**/query"]])
def test_parameters_are_excluded_from_decay_by_path(patterns):
    optimizer = AdamW(0.01, weight_decay=0.1, mask=Excluding(patterns))
    found, _ = trees.run(optimizer, 3)
    chosen = trees.DECAYS | {"blocks": trees.DECAYS["blocks"] | {"query": False}}
    expected = trees.run_optax(optax.adamw(0.01, weight_decay=0.1, mask=chosen), 3)
    trees.assert_close(found, expected, 1e-6)


def test_of_all_parameters_some_may_be_excluded():
    optimizer = AdamW(0.01, weight_decay=0.1, mask=Excluding(["bias"], lambda path, shape: True))
    found, _ = trees.run(optimizer, 3)
    chosen = {"blocks": {"query": True, "bias": False, "w_in": True}, "scale": True}
    expected = trees.run_optax(optax.adamw(0.01, weight_decay=0.1, mask=chosen), 3)
    trees.assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("kind", [AdamW, Sgd])
def test_excluding_what_there_is_not_is_told(kind):
    optimizer = kind(0.01, weight_decay=0.1, mask=Excluding(["qery", "scale", "blocks/x"]))
    with pytest.raises(ValueError) as error:
        md.jit(optimizer.init, backend="numpy")(trees.tree(0))
    assert str(error.value) == (
        "excluded from weight decay: no parameter is meant by 'qery'. Did you mean `query`?; "
        "no parameter is meant by 'blocks/x'. Did you mean `blocks` or `blocks/w_in`?"
    )


def test_a_schedule_sets_the_rate():
    schedule = schedules.warmup_cosine(0.02, 3, 8)
    found, _ = trees.run(AdamW(schedule, weight_decay=0.1), 8)
    theirs = optax.warmup_cosine_decay_schedule(0, 0.02, 3, 8)
    expected = trees.run_optax(optax.adamw(theirs, weight_decay=0.1, mask=trees.DECAYS), 8)
    trees.assert_close(found, expected, 2e-6)


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_sharded_values_are_the_unsharded_ones_and_nothing_moves(backend):
    optimizer = AdamW(0.01, weight_decay=0.1)
    found, state = trees.run(optimizer, 3, *trees.SHARDED, backend=backend)
    expected, expected_state = trees.run(optimizer, 3)
    trees.assert_close(found, expected, 1e-6)
    trees.assert_close(state, expected_state, 1e-6)
    params = trees.tree(0)
    assert trees.collectives(optimizer.update, params, state, params, 0) == []


def test_the_state_mirrors_the_parameters():
    graph = md.jit(AdamW(0.01).init).trace(trees.tree(0))
    names = ["blocks/bias", "blocks/query", "blocks/w_in", "scale"]
    kinds = ("mean", "mean_square")
    assert list(graph.output_paths) == [f"{kind}/params/{name}" for kind in kinds for name in names]
    assert graph.outputs[1].shape.names == ("layers", "embed", "heads")


def test_biases_and_scales_do_not_decay_whatever_their_dims():
    wide = md.Shape(md.dims(layers=2, heads=3, kv=4))
    assert is_matrix("blocks/attention/query", wide)
    assert not is_matrix("blocks/attention/query_bias", wide)
    assert not is_matrix("blocks/norm/scale", wide)
    assert not is_matrix("blocks/shift", wide.without(["kv"]))


def test_narrow_parameters_have_wide_means():
    found, state = trees.run(AdamW(0.01), 2, dtype=dtypes.BFLOAT16)
    assert found["scale"].dtype == dtypes.BFLOAT16
    assert state.mean.params["scale"].dtype == np.float32
    exact, _ = trees.run(AdamW(0.01), 2)
    np.testing.assert_allclose(np.asarray(found["scale"], "f4"), exact["scale"], rtol=0.02)


def test_what_has_no_gradient_stays_as_it_is():
    optimizer = AdamW(0.1)

    def step(params):
        grads = md.grad(lambda p: md.sum(md.square(p["x"])))(params)
        return optimizer.update(grads, optimizer.init(params), params, md.zeros([], "int32"))

    params = {"x": md.named(np.ones(3, "f4"), ["i"]), "count": md.named(np.int32(7), [])}
    updated, state = md.jit(step)(params)
    assert int(updated["count"]) == 7
    assert state.mean.params["count"] is None
    np.testing.assert_allclose(updated["x"], 0.9, rtol=1e-6)


def test_an_update_is_few_operations():
    """As few passes over memory as the formula has; scalars do not count."""
    x = md.named(np.ones((4, 5), "f4"), ["i", "j"])
    optimizer = AdamW(schedules.warmup_cosine(0.1, 2, 9), weight_decay=0.1)
    state = md.jit(optimizer.init)(x)
    program = md.jit(optimizer.update).lower(x, state, x, 0)
    wide = [i for i in program.block.instructions if i.outputs[0].shape]
    assert len(wide) <= 15, [i.op for i in wide]


def test_numbers_out_of_range_are_told_together():
    with pytest.raises(ValueError) as error:
        AdamW(0.1, b1=1.0, b2=-0.5, eps=0.0, weight_decay=-1)
    assert str(error.value) == (
        "AdamW: b1 must be in [0, 1), got 1.0; b2 must be in [0, 1), got -0.5; "
        "eps must be in (0, inf), got 0.0; weight_decay must be in [0, inf), got -1"
    )
