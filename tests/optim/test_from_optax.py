"""optax's optimizers in our programs: the parameters that optax itself gives, on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import meshdsl as md
from meshdsl.optim import AdamW, as_optimizer, from_optax, schedules
from meshdsl.tensors import dtypes
from tests.optim import trees


def joined():
    parts = [optax.linear_schedule(0.0, 0.1, 2), optax.cosine_decay_schedule(0.1, 4)]
    return optax.join_schedules(parts, [2])


def by_kind(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


TRANSFORMATIONS = {
    "adam": lambda: optax.adam(0.05),
    "adamw, masked": lambda: optax.adamw(0.05, weight_decay=0.1, mask=trees.DECAYS),
    "adamw, nesterov": lambda: optax.adamw(0.05, nesterov=True, eps_root=1e-8),
    "adamax": lambda: optax.adamax(0.05),
    "amsgrad": lambda: optax.amsgrad(0.05),
    "adabelief": lambda: optax.adabelief(0.05),
    "adadelta": lambda: optax.adadelta(0.5),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=8),
    "adagrad": lambda: optax.adagrad(0.05),
    "adan": lambda: optax.adan(0.05),
    "lamb": lambda: optax.lamb(0.05, weight_decay=0.1),
    "lars": lambda: optax.lars(0.05, weight_decay=0.1),
    "lion": lambda: optax.lion(0.05),
    "nadam": lambda: optax.nadam(0.05),
    "novograd": lambda: optax.novograd(0.05),
    "radam": lambda: optax.radam(0.05),
    "rmsprop": lambda: optax.rmsprop(0.05, momentum=0.9, centered=True),
    "rprop": lambda: optax.rprop(0.05),
    "sgd": lambda: optax.sgd(0.05),
    "sgd, nesterov": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "sm3": lambda: optax.sm3(0.05),
    "yogi": lambda: optax.yogi(0.05),
    "schedule": lambda: optax.adam(joined()),
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.05)),
    "clipped": lambda: optax.chain(optax.clip(0.1), optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.05), every_k_schedule=2),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.05), 3),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=joined()),
    "partitioned": lambda: optax.partition(
        {"matrix": optax.adam(0.05), "vector": optax.sgd(0.01, momentum=0.9)}, by_kind
    ),
    "powers": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda u: -1e-3 * u**3 * jnp.sum(jax.lax.integer_pow(u, 0)), updates
        )
    ),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.05, warmup_steps=2),
}


SHARDED = [
    "adam",
    "adamw, masked",
    "adafactor",
    "accumulated",
    "global norm",
    "injected",
    "lamb",
    "lion",
    "partitioned",
    "rmsprop",
    "schedule-free",
    "sgd, nesterov",
]


@pytest.mark.long
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_it_gives_the_parameters_of_optax(name):
    transformation = TRANSFORMATIONS[name]()
    found, _ = trees.run(from_optax(transformation), 4, backend="numpy")
    trees.assert_close(found, trees.run_optax(TRANSFORMATIONS[name](), 4), 2e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_values_are_the_unsharded_ones(name):
    optimizer = from_optax(TRANSFORMATIONS[name]())
    found, state = trees.run(optimizer, 3, *trees.SHARDED)
    expected, expected_state = trees.run(optimizer, 3)
    trees.assert_close(found, expected, 5e-6)
    trees.assert_close(state, expected_state, 5e-6)


def test_its_state_lies_like_the_parameters():
    optimizer, params = from_optax(optax.adam(0.05)), trees.tree(0)
    state = md.jit(optimizer.init)(params)

    def step(params, state, grads):
        return {"params": optimizer.update(grads, state, params, 0), "state": state}

    layout = "params/embed:data; params/d_ff:data?"
    program = md.jit(step, "data:8", layout).lower(params, state, params)
    where = dict(zip(program.input_paths, program.block.inputs, strict=True))
    held = where["state/0/mu/params/blocks/query"]
    assert held.layout.axes("embed") == ("data",)
    assert where["state/0/count"].shape == ()


def test_masked_parameters_have_none_in_the_state():
    optimizer, params = from_optax(TRANSFORMATIONS["partitioned"]()), trees.tree(0)
    graph = md.jit(lambda params: {"params": params, "state": optimizer.init(params)}).trace(params)
    paths = [path for path in graph.output_paths if path.endswith("mu/params/blocks/query")]
    assert len(paths) == 1
    assert not any(path.endswith("mu/params/scale") for path in graph.output_paths)


def test_what_has_no_gradient_stays_as_it_is():
    optimizer = from_optax(optax.adamw(0.1, weight_decay=0.1))

    def step(params):
        grads = md.grad(lambda p: md.sum(md.square(p["x"])))(params)
        return optimizer.update(grads, optimizer.init(params), params, md.zeros([], "int32"))[0]

    params = {"x": md.named(np.ones(3, "f4"), ["i"]), "count": md.named(np.int32(7), [])}
    assert int(md.jit(step)(params)["count"]) == 7


@pytest.mark.long
def test_narrow_parameters_are_updated_as_by_optax():
    found, _ = trees.run(from_optax(optax.adam(0.01)), 2, dtype=dtypes.BFLOAT16)
    expected = trees.run_optax(optax.adam(0.01), 2, dtypes.BFLOAT16)
    assert found["scale"].dtype == dtypes.BFLOAT16
    trees.assert_close(found, expected, 2e-2)


@pytest.mark.parametrize(
    ("transformation", "named"),
    [
        (optax.contrib.muon(0.1), "a constant of shape [3]"),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "random_seed"),
        (
            optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.cumsum(x, -1), u)),
            "no translation of `cumsum`",
        ),
        (
            optax.stateless(lambda u, p: jax.tree.map(lambda x: x.reshape(-1), u)),
            "`reshape`: from",
        ),
        (
            optax.stateless(lambda u, p: {"x": u["x"] + u["x"].T}),
            "brings dims `i` and `j` together",
        ),
    ],
)
def test_what_would_not_be_the_same_on_every_layout_is_refused_by_name(transformation, named):
    params = {"x": md.named(np.ones((3, 3), "f4"), ["i", "j"])}
    optimizer = from_optax(transformation)
    with pytest.raises(ValueError) as error:
        md.jit(lambda p: optimizer.update(p, optimizer.init(p), p, md.zeros([], "int32")))(params)
    assert "from_optax: the `" in str(error.value) and named in str(error.value)


def square():
    """Parameters of which several dims have one size, in two orders."""
    rows, columns, layers = md.dims(rows=8, columns=8, layers=8)
    shapes = {"a": [rows, columns], "b": [columns, rows], "c": [layers, rows, columns]}
    return {
        name: md.named(np.random.default_rng(len(name)).standard_normal([8] * len(dims)), dims)
        for name, dims in shapes.items()
    }


FACTORED = {
    "alone": lambda: optax.adafactor(0.05, min_dim_size_to_factor=8),
    "momentum": lambda: optax.adafactor(0.05, min_dim_size_to_factor=8, momentum=0.9),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), FACTORED["alone"]()),
    "masked": lambda: optax.masked(FACTORED["alone"](), {"a": True, "b": False, "c": True}),
    "accumulated": lambda: optax.MultiSteps(FACTORED["alone"](), 2),
    "partitioned": lambda: optax.multi_transform(
        {"cube": FACTORED["alone"](), "matrix": optax.lion(0.05)},
        lambda params: jax.tree.map(lambda p: "cube" if p.ndim > 2 else "matrix", params),
    ),
    "injected": lambda: optax.inject_hyperparams(
        optax.adafactor, static_args=["min_dim_size_to_factor"]
    )(learning_rate=0.05, min_dim_size_to_factor=8),
    "sm3": lambda: optax.sm3(0.05),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FACTORED)
def test_dims_of_one_size_are_told_apart_by_what_an_update_reduces(name):
    optimizer, transformation = from_optax(FACTORED[name]()), FACTORED[name]()
    params, plain = square(), trees.arrays(square())
    held = transformation.init(plain)
    where = "data:2,model:2", "rows:data; columns:model"
    state = md.jit(optimizer.init, *where)(params)
    alone, alone_state = params, md.jit(optimizer.init)(params)
    split, unsplit = md.jit(optimizer.update, *where), md.jit(optimizer.update)
    for number in range(3):
        grads = jax.tree.map(lambda p: p * (number + 0.5), plain)  # noqa: B023
        updates, held = transformation.update(grads, held, plain)
        plain = optax.apply_updates(plain, updates)
        named = {key: md.named(grads[key], params[key].dims) for key in params}
        params, state = split(named, state, params, number)
        alone, alone_state = unsplit(named, alone_state, alone, number)
    trees.assert_close(params, plain, 1e-5)
    trees.assert_close(alone, plain, 1e-5)
    trees.assert_close(state, alone_state, 1e-5)


def test_factored_moments_of_a_square_matrix_lie_like_the_dims_that_they_keep():
    optimizer, params = from_optax(FACTORED["alone"]()), square()
    state = md.jit(optimizer.init, "data:2,model:2", "rows:data; columns:model")(params)
    moments = state[0]
    rows, columns = moments.v_row["a"], moments.v_col["a"]
    assert (rows.dims.names, columns.dims.names) == (("rows",), ("columns",))
    assert (rows.layout.axes("rows"), columns.layout.axes("columns")) == (("data",), ("model",))
    assert moments.v_row["b"].dims.names == ("columns",)
    assert moments.v_row["c"].dims.names == ("layers", "rows")


def test_the_dims_of_a_state_leave_no_operations_behind():
    optimizer, params = from_optax(FACTORED["alone"]()), square()
    names = {op.primitive.name for op in md.jit(optimizer.init).trace(params).operations}
    assert names <= {"constant", "full", "broadcast", "transpose", "iota"}


def test_what_decides_in_python_by_a_traced_number_is_refused_with_the_way_out():
    injected = optax.inject_hyperparams(optax.adafactor)(0.05, min_dim_size_to_factor=8)
    with pytest.raises(ValueError, match=r"jax\.jit refuses it too \(.*static_args") as error:
        md.jit(lambda p: from_optax(injected).init(p))(square())
    assert "\n" not in str(error.value).partition("static_args")[0]


def test_what_needs_parameters_of_its_own_kind_is_refused():
    params = {"x": md.named(np.ones(3, "f4"), ["i"])}
    optimizer = from_optax(optax.lookahead(optax.sgd(0.1), 3, 0.5))
    state = md.jit(optimizer.init)(params)
    with pytest.raises(ValueError, match=r"parameters alone .*no attribute 'fast'"):
        md.jit(optimizer.update)(params, state, params, 0)


def test_the_state_of_another_optimizer_is_refused():
    params = {"x": md.named(np.ones(3, "f4"), ["i"])}
    with pytest.raises(ValueError, match=r"the state has 0 arrays, and that of this transf.* 3; g"):
        md.jit(from_optax(optax.adam(0.1)).update)(params, (), params, 0)


def test_what_needs_the_loss_is_refused():
    optimizer = from_optax(optax.polyak_sgd())
    params = {"x": md.named(np.ones(3, "f4"), ["i"])}
    with pytest.raises(ValueError, match="cannot be called with gradients, state and parameters"):
        md.jit(lambda p: optimizer.update(p, optimizer.init(p), p, 0))(params)


def test_what_is_no_optimizer_is_an_error():
    with pytest.raises(ValueError, match=r"an optimizer is one of meshdsl.optim or of optax"):
        as_optimizer(0.1)
    with pytest.raises(ValueError, match="learning_rate must be a number"):
        from_optax(optax.sgd(0.1), learning_rate=-1)


def test_optimizers_of_ours_stay_as_they_are():
    ours = AdamW(0.1)
    assert as_optimizer(ours) is ours
    rate = schedules.constant(0.1)
    assert as_optimizer(from_optax(optax.sgd(0.1), rate)).learning_rate is rate


def test_a_state_lies_like_the_parameter_of_the_longest_path_in_its_own():
    params = {
        "w": md.named(np.ones((4, 8), "f4"), ["x", "y"]),
        "layers": {"w": md.named(np.ones(4, "f4"), ["z"])},
    }
    optimizer = from_optax(optax.adam(0.05))
    state = md.jit(optimizer.init)(params)
    after, state = md.jit(optimizer.update)(params, state, params, 0)
    assert state[0].mu["layers"]["w"].dims == params["layers"]["w"].dims
    assert state[0].mu["w"].dims == params["w"].dims
    np.testing.assert_allclose(after["layers"]["w"], np.full(4, 0.95), rtol=1e-6)


def test_parameters_may_be_one_tensor():
    params = md.named(np.ones((4, 8), "f4"), ["x", "y"])
    optimizer = from_optax(optax.adam(0.05))
    state = md.jit(optimizer.init)(params)
    after, state = md.jit(optimizer.update)(params, state, params, 0)
    assert state[0].mu.dims == params.dims
    np.testing.assert_allclose(after, np.full((4, 8), 0.95), rtol=1e-6)
