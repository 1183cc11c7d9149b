"""What libraries on JAX need: boxes, names of their own, optax in the step, and the way back."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

import meshdsl as md

MESH, LAYOUT = "data:2,model:4", "batch:data; hidden:model"
NAMES = {"x": "batch feature", "params/w_in": "_ hidden"}


class Box:
    """An array with an attribute `value`, as Flax keeps them."""

    def __init__(self, value):
        self.value = value


jax.tree_util.register_pytree_with_keys(
    Box, lambda box: (((GetAttrKey("value"), box.value),), None), lambda _, inner: Box(*inner)
)


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w_in"]) @ params["w_out"]) ** 2)


def boxed_loss(params, x):
    return loss({name: box.value for name, box in params.items()}, x)


@pytest.fixture
def given():
    draw = np.random.default_rng(0)
    sizes = {"w_in": (6, 8), "w_out": (8, 5)}
    params = {name: draw.normal(size=s).astype(np.float32) for name, s in sizes.items()}
    return params, draw.normal(size=(4, 6)).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "at once"])
@pytest.mark.parametrize("transform", ["value_and_grad", "grad"])
def test_gradients_of_programs_take_plain_arrays(given, transform, jitted):
    step = getattr(md, transform)(md.from_jax(loss, NAMES))
    if jitted:
        step = md.jit(step, MESH, LAYOUT)
    expected = jax.tree.leaves(getattr(jax, transform)(loss)(*given))
    for mine, theirs in zip(jax.tree.leaves(md.unnamed(step(*given))), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_a_step_with_optax_in_it_has_the_numbers_of_jax_and_states_that_lie_like_parameters(given):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def train_step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, x = given
    run = md.jit(md.from_jax(train_step, NAMES), MESH, LAYOUT)
    ours = theirs = (params, tx.init(params))
    for _ in range(3):
        *ours, value = run(*ours, x)
        *theirs, expected = jax.jit(train_step)(*theirs, x)
        np.testing.assert_allclose(float(value), expected, rtol=1e-5)
    assert str(ours[1][1][0].mu["w_in"].layout) == "hidden:model"
    plain = md.unnamed(ours)
    assert jax.tree.structure(plain) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(plain), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("key", ["params/w_in", "params/w_in/value", "**/w_in", "params/*_in"])
def test_a_name_of_a_box_is_one_of_its_value(given, key):
    params, x = given
    program = md.from_jax(boxed_loss, {"x": "batch feature", key: "_ hidden"})
    boxes = {name: Box(value) for name, value in params.items()}
    inferred = program.inferred(boxes, x)
    assert inferred.paths == ("params/w_in", "params/w_out", "x")
    assert inferred.inputs[:2] == (("feature", "hidden"), ("hidden", "w_out_1"))
    by_scope = md.jit(program, MESH, "params/w_out/hidden:model", backend="numpy")
    np.testing.assert_allclose(float(by_scope(boxes, x)), loss(params, x), rtol=1e-5)


def test_a_key_called_value_is_no_box():
    weights = {"attention": {"value": np.ones((2, 3), "f")}, "out": np.ones((3,), "f")}
    program = md.from_jax(
        lambda p: p["attention"]["value"] @ p["out"], {"p/*": "a", "p/*/value": "b _"}
    )
    assert program.inferred(weights).inputs == (("b", "a"), ("a",))


def test_partition_specs_name_dims_also_in_boxes(given):
    params, x = given
    specs = {"w_in": PartitionSpec("feature", "hidden"), "w_out": PartitionSpec(None, "digit")}
    expected = (("feature", "hidden"), ("hidden", "digit"), ("batch", "feature"))
    for tree in (specs, {name: Box(spec) for name, spec in specs.items()}):
        program = md.from_jax(loss, {"params": tree, "x": "batch _"})
        assert program.inferred(params, x).inputs == expected


def test_a_partition_spec_may_be_short_and_may_merge_dims():
    names = {"x": PartitionSpec("batch"), "w": PartitionSpec(None, ("heads", "kv"))}
    program = md.from_jax(lambda x, w: (x @ w).reshape(4, 2, 3), names)
    inferred = program.inferred(np.ones((4, 5), "f"), np.ones((5, 6), "f"))
    assert inferred.inputs[0][0] == "batch" and inferred.inputs[1][1] == "heads_kv"
    assert inferred.outputs == (("batch", "heads", "kv"),)


def test_a_partition_spec_with_too_many_names_is_refused():
    program = md.from_jax(lambda x: x, {"x": PartitionSpec("batch", "length")})
    with pytest.raises(ValueError, match="names 2 dims, but it has 1"):
        program.named(np.ones(3, "f"))


def test_changes_in_place_that_are_lost_are_warned_of():
    def change(box, x):  # as nnx.Optimizer.update does
        box.value = box.value - x
        return jnp.sum(box.value)

    x = np.ones((2, 3), np.float32)
    match = r"change at .*test_libraries.py:\d+ .*in place \(box\) and does not return"
    with pytest.warns(UserWarning, match=match):
        md.from_jax(change)(Box(x), x)


def put_back_as_it_was(box, x):  # as nnx.jit and nnx.remat do
    total, box.value = jax.jit(lambda value: (jnp.sum(value * x), value))(box.value)
    return total


def handed_on(box, x):
    box.value = box.value - x
    return jax.jit(lambda value: jax.checkpoint(lambda inner: inner)(value))(box.value)


def with_a_working_value(batch, x):
    batch["mask"] = batch["tokens"] > 0
    return jnp.sum(jnp.where(batch["mask"], batch["tokens"], x))


@pytest.mark.parametrize("change", [put_back_as_it_was, handed_on, with_a_working_value])
def test_of_changes_that_lose_nothing_there_is_no_warning(change):
    x = np.ones((2, 3), np.float32)
    given = {"tokens": x} if change is with_a_working_value else Box(x)
    expected = change(jax.tree.map(jnp.asarray, given), x)
    np.testing.assert_array_equal(np.asarray(md.from_jax(change)(given, x)), expected)


def test_a_change_inside_of_a_call_is_lost_and_no_other():
    def change(boxes, x):
        @jax.jit
        def inner(first, second):
            return jnp.sum(first * x), first, second + x

        total, boxes[0].value, boxes[1].value = inner(boxes[0].value, boxes[1].value)
        return total

    x = np.ones((2, 3), np.float32)
    with pytest.warns(UserWarning, match=r"in place \(boxes/1\) and does not return"):
        md.from_jax(change)([Box(x), Box(x)], x)


def test_a_number_that_has_to_be_known_leads_to_from_equinox():
    program = md.from_jax(lambda net, x: 2 * x if net["doubles"] else x)
    with pytest.raises(jax.errors.ConcretizationTypeError) as told:
        program({"doubles": True, "w": np.ones(2, np.float32)}, np.ones(3, np.float32))
    assert "here with net/doubles. md.from_equinox keeps numbers" in told.value.__notes__[-1]


def test_names_of_results_that_do_not_exist_are_told():
    program = md.from_jax(lambda x: {"weight": x}, {"x": "row", "return/wieght": "row"})
    message = r"names\['return/wieght'\] matches no result.*Did you mean.*return/weight"
    with pytest.raises(ValueError, match=message):
        program(np.ones(3, np.float32))


def test_changes_in_place_that_are_returned_are_kept():
    def change(box, x):
        box.value = box.value - x
        return jnp.sum(x), box

    x = np.ones((2, 3), np.float32)
    _, box = md.from_jax(change)(Box(x), x)
    np.testing.assert_array_equal(np.asarray(box.value), np.zeros((2, 3)))


def test_functions_among_arguments_are_refused_with_the_fix(given):
    model = {"w": given[1], "activation": jnp.tanh}
    program = md.from_jax(lambda model: model["activation"](model["w"]))
    with pytest.raises(ValueError, match=r"model/activation: .* is a function.*md\.from_equinox"):
        md.jit(program)(model)


@pytest.mark.long
def test_unnamed_gives_arrays_without_pads_and_leaves_the_rest():
    x = md.jit(lambda x: x + 1, "data:4", "batch:data")(md.zeros(md.dims(batch=6)))
    assert x.data.shape != (6,)
    plain = md.unnamed({"x": x, "step": 3, "rest": SimpleNamespace})
    assert isinstance(plain["x"], jax.Array) and plain["step"] == 3
    np.testing.assert_array_equal(plain["x"], np.ones(6))
