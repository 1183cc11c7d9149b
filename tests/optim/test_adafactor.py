"""Adafactor, against optax's; stacked layers, against layers by themselves."""

import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.optim import Adafactor, schedules
from tests.optim import trees

FLAT = {"w": ["embed", "d_ff"], "conv": ["tap", "embed", "heads"], "bias": ["d_ff"], "c": []}
SIZES = {"embed": 8, "d_ff": 16, "tap": 3, "heads": 4, "layers": 2}


def tree(seed, dims=FLAT):
    rng = np.random.default_rng(seed)
    arrays = {
        n: rng.standard_normal([SIZES[d] for d in one]).astype("f4") for n, one in dims.items()
    }
    return {name: md.named(np.asarray(array), dims[name]) for name, array in arrays.items()}


def run(optimizer, steps=4, mesh=None, layout=None, dims=FLAT):
    step = md.jit(optimizer.update, mesh, layout)
    params = tree(0, dims)
    state = md.jit(optimizer.init, mesh, layout)(params)
    for number in range(steps):
        params, state = step(tree(1 + number, dims), state, params, number)
    return params, state


def run_optax(transformation, steps=4, dims=FLAT):
    params = trees.arrays(tree(0, dims))
    state = transformation.init(params)
    for number in range(steps):
        grads = trees.arrays(tree(1 + number, dims))
        updates, state = transformation.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multiply_by_parameter_scale": False, "clipping_threshold": None},
        {"momentum": 0.9, "decay_rate": 0.6, "clipping_threshold": 0.5},
    ],
)
def test_it_is_that_of_optax(options):
    found, _ = run(Adafactor(0.05, min_dim_size_to_factor=4, **options))
    expected = run_optax(optax.adafactor(0.05, min_dim_size_to_factor=4, **options))
    trees.assert_close(found, expected, 2e-6)


@pytest.mark.long
def test_a_schedule_sets_the_rate_and_matrices_decay_by_it():
    found, _ = run(Adafactor(schedules.constant(0.05), 4, weight_decay=0.1))
    mask = {"w": True, "conv": True, "bias": False, "c": False}
    theirs = optax.adafactor(0.05, 4, weight_decay_rate=0.005, weight_decay_mask=mask)
    trees.assert_close(found, run_optax(theirs), 2e-6)


def test_the_two_largest_dims_are_factored_and_small_ones_are_not():
    optimizer = Adafactor(0.1, min_dim_size_to_factor=4)
    _, state = run(optimizer, 1)
    names = {n: None if a is None else a.dims.names for n, a in state.row.params.items()}
    assert names == {"w": ("embed",), "conv": ("tap", "heads"), "bias": None, "c": None}
    assert state.column.params["w"].dims.names == ("d_ff",)
    assert state.column.params["conv"].dims.names == ("tap", "embed")
    assert [n for n, a in state.full.params.items() if a is not None] == ["bias", "c"]
    assert state.mean is None
    _, state = run(Adafactor(0.1), 1)
    assert all(a is None for a in state.row.params.values())


def test_stacked_layers_are_parameters_by_themselves():
    stacked = {"w": ["layers", "embed", "d_ff"]}
    optimizer = Adafactor(0.05, min_dim_size_to_factor=4)
    found, state = run(optimizer, dims=stacked)
    assert state.row.params["w"].dims.names == ("layers", "embed")
    theirs = optax.adafactor(0.05, min_dim_size_to_factor=4)
    params = np.asarray(tree(0, stacked)["w"])
    for layer in range(2):
        one = params[layer]
        held = theirs.init(one)
        for number in range(4):
            grad = np.asarray(tree(1 + number, stacked)["w"])[layer]
            updates, held = theirs.update(grad, held, one)
            one = optax.apply_updates(one, updates)
        np.testing.assert_allclose(np.asarray(found["w"])[layer], one, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["embed:data; d_ff:model", "d_ff:data; heads:model; tap:data?"])
def test_sharded_values_are_the_unsharded_ones(layout):
    optimizer = Adafactor(0.05, min_dim_size_to_factor=4, momentum=0.9)
    found, state = run(optimizer, 3, "data:2,model:4", layout)
    expected, expected_state = run(optimizer, 3)
    trees.assert_close(found, expected, 2e-6)
    trees.assert_close(state, expected_state, 2e-6)


def test_split_dims_reduce_rows_columns_and_scalars_only():
    optimizer, params = Adafactor(0.05, min_dim_size_to_factor=4), {"w": tree(0)["w"]}
    state = md.jit(optimizer.init)(params)
    program = md.jit(optimizer.update, "data:4", "embed:data").lower(params, state, params, 0)
    assert max(c.payload_bytes for c in program.collectives) <= 16 * 4 + 16


@pytest.mark.parametrize("options", [{}, {"eps": 1e-37}, {"min_dim_size_to_factor": 4}])
def test_a_parameter_without_gradient_stays_as_it_is(options):
    optimizer, params = Adafactor(0.05, **options), tree(0)
    grads = {name: md.named(np.zeros_like(p), p.dims) for name, p in params.items()}
    after, _ = md.jit(optimizer.update)(grads, md.jit(optimizer.init)(params), params, 0)
    trees.assert_close(after, params, 0)


@pytest.mark.parametrize("eps", [0, 1e-50])
def test_squares_that_may_be_zero_are_refused(eps):
    with pytest.raises(ValueError, match="eps must be in"):
        Adafactor(0.05, eps=eps)


def test_its_state_is_small():
    spec = {"w": md.spec(md.dims(embed=1024, d_ff=4096))}
    graph = md.jit(Adafactor(0.1).init).trace(spec)
    assert sum(t.bytes for t in graph.outputs) == 4 * (1024 + 4096)


def test_numbers_out_of_range_are_reported_together():
    with pytest.raises(ValueError) as error:
        Adafactor(-1, 0, decay_rate=0, clipping_threshold=0, momentum=1, eps=-1)
    assert str(error.value) == (
        "Adafactor: min_dim_size_to_factor must be in [1, inf), got 0; "
        "decay_rate must be in (0, inf), got 0; eps must be in [1e-37, inf), got -1; "
        "clipping_threshold must be in (0, inf), got 0; momentum must be in [0, 1), got 1; "
        "learning_rate must be a number in [0, inf) or a schedule, got -1"
    )


@pytest.mark.parametrize("dims", [["embed"], [], ["d_ff", "embed"]])
def test_a_gradient_may_have_fewer_dims_or_another_order(dims):
    sizes = {"embed": 4, "d_ff": 8}
    optimizer = Adafactor(0.1, min_dim_size_to_factor=4)
    params = {"w": md.named(np.ones((4, 8), np.float32), ["embed", "d_ff"])}
    given = np.random.default_rng(0).normal(size=[sizes[d] for d in dims]).astype(np.float32)
    given = md.named(given, dims)

    def after(g):
        return optimizer.update({"w": g}, optimizer.init(params), params, 0)[0]["w"]

    whole = md.broadcast(given, params["w"].dims)
    np.testing.assert_array_equal(after(given), after(whole))
