"""Equal layers as one loop: numbers, stacks and the way back, beside the function as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.training.state import TrainState
from meshdsl.training.step import make_train_step

EMBED, HIDDEN, LAYERS = 8, 16, 4
NAMES = {
    "params/layers/*/w_in": "embed d_ff",
    "x": "batch length embed",
}


def weights(layers=LAYERS, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*sizes):
        return (0.3 * rng.standard_normal(sizes)).astype("float32")

    def layer():
        return {
            "w_in": draw(EMBED, HIDDEN),
            "bias": draw(HIDDEN),
            "w_out": draw(HIDDEN, EMBED),
        }

    return {"scale": draw(EMBED), "layers": [layer() for _ in range(layers)], "out": draw(EMBED, 5)}


X = np.random.default_rng(9).standard_normal((8, 4, EMBED)).astype("float32")


def block(layer, x):
    centred = x - x.mean(-1, keepdims=True)
    return x + jax.nn.gelu(centred @ layer["w_in"] + layer["bias"]) @ layer["w_out"]


def plain(params, x):
    x = x * params["scale"]
    for layer in params["layers"]:
        x = block(layer, x)
    return jnp.mean((x @ params["out"]) ** 2)


def scans(function, *arguments):
    """Returns the lengths of the loops of a function."""
    program = md.jit(function, backend="numpy").lower(*arguments)
    return [i.params["length"] for i in program.block.instructions if i.op == "scan"]


def check(function, params, x, names=NAMES, loops=(LAYERS,), tolerance=1e-5, **where):
    """Compares the value and gradients of a rolled function with JAX's; returns the program."""
    program = md.from_jax(function, names, roll="layers")
    arguments = program.named(params, x)
    assert scans(program, *arguments) == list(loops)
    expected, slopes = jax.value_and_grad(function)(params, x)
    value, gradients = md.jit(md.value_and_grad(program), backend="numpy", **where)(*arguments)
    np.testing.assert_allclose(float(value), expected, rtol=tolerance)
    back = program.unrolled(gradients)
    assert jax.tree.structure(md.unnamed(back)) == jax.tree.structure(params)
    for mine, theirs in zip(
        jax.tree.leaves(md.unnamed(back)), jax.tree.leaves(slopes), strict=True
    ):
        scale = max(1, np.abs(theirs).max())
        np.testing.assert_allclose(np.asarray(mine), theirs, atol=tolerance * scale)
    return program, arguments


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        {},
        {"mesh": "data:2,model:2", "layout": "batch:data; d_ff:model"},
        {"mesh": "data:2,model:2", "layout": "batch:data; params/layers:model"},
    ],
)
def test_layers_are_one_loop_with_the_numbers_of_jax(where):
    _, (params, _) = check(plain, weights(), X, **where)
    assert params["layers"][0]["w_in"].dims.names == ("layers", "embed", "d_ff")
    assert params["layers"][1] == {"w_in": None, "bias": None, "w_out": None}
    assert params["out"].dims.names[0] == "embed"


@pytest.mark.long
def test_a_pipeline_splits_the_layers():
    def loss(params, batch):
        return plain(params, batch["x"])

    names = {"params/layers/*/w_in": "embed d_ff", "batch/x": "batch length embed"}
    program = md.from_jax(loss, names, roll="layers")
    params, batch = program.named(weights(), {"x": X})
    optimizer = md.optim.Sgd(0.1)
    step = make_train_step(program, optimizer, microbatches=2)
    state = TrainState(md.named(np.int32(0), []), params, md.jit(optimizer.init)(params))
    found = []
    for where in ({}, {"mesh": "stage:2,data:2", "layout": "batch:data; layers:stage"}):
        after, metrics = md.jit(step, **where)(state, batch)
        found.append((float(metrics["loss"]), md.unnamed(program.unrolled(after.params))))
    (one, apart), (other, split) = found
    np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(one, plain(weights(), X), rtol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(apart), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_plain_arrays_and_tensors_of_each_layer_will_do():
    params = weights()
    program = md.from_jax(plain, NAMES, roll="layers")
    value, gradients = md.jit(md.value_and_grad(program))(params, X)
    expected = jax.value_and_grad(plain)(params, X)
    np.testing.assert_allclose(float(value), expected[0], rtol=1e-5)
    own = md.unnamed(program.unrolled(gradients))
    np.testing.assert_allclose(
        own["layers"][2]["bias"], expected[1]["layers"][2]["bias"], atol=1e-5
    )
    apart = md.from_jax(plain, NAMES).named(params, X)  # each layer apart
    np.testing.assert_allclose(float(md.jit(program)(*apart)), expected[0], rtol=1e-5)
    assert scans(program, *apart) == [LAYERS]


def test_compile_time_does_not_grow_with_layers():
    few, many = (
        md.jit(md.from_jax(plain, NAMES, roll="layers")).lower(weights(n), X) for n in (2, 12)
    )
    assert len(few.block.instructions) == len(many.block.instructions)


def test_what_layers_share_and_leave_is_as_before():
    def function(params, x):
        kept, bias = [], jnp.sin(params["scale"])
        for layer in params["layers"]:
            x = block(layer, x + bias)
            kept.append(jnp.sum(x * params["scale"], -1))
        return jnp.mean(x) + jnp.sum(jnp.stack(kept[1:]) ** 2) + jnp.sum(kept[0])

    check(function, weights(), X)


def test_layers_with_numbers_of_their_own():
    def function(params, x):
        for number, layer in enumerate(params["layers"]):
            x = x * (1 - number / 10) + block(layer, x)
        return jnp.mean(x**2)

    check(function, weights(), X)


def test_two_stacks_are_two_loops():
    def function(params, x):
        for layer in params["first"]["layers"]:
            x = block(layer, x)
        x = jnp.tanh(x) * params["first"]["scale"]
        for layer in params["second"]["layers"]:
            x = x + jnp.cos(x @ layer["w_in"]) @ layer["w_out"] + jnp.sum(layer["bias"])
        return jnp.mean(x**2)

    params = {"first": weights(3), "second": weights(5, seed=1)}
    names = {"params/*/layers/*/w_in": "embed d_ff", "x": "batch length embed"}
    _, (named, _) = check(function, params, X, names, loops=(3, 5))
    first, second = (named[name]["layers"][0]["w_in"] for name in ("first", "second"))
    assert first.dims.names == ("layers", "embed", "d_ff")
    assert second.dims.names == ("layers_2", "embed", "d_ff")


def test_a_first_layer_that_is_unlike_stays_apart():
    def function(params, x):
        first, *others = params["layers"]
        x = jnp.tanh(x @ first["w_in"] + first["bias"]) @ first["w_out"]
        for layer in others:
            x = block(layer, x)
        return jnp.mean(x**2)

    _, (params, _) = check(function, weights(), X, loops=(LAYERS - 1,))
    assert params["layers"][0]["w_in"].dims.names == ("embed", "d_ff")
    assert params["layers"][1]["w_in"].dims.names == ("layers", "embed", "d_ff")


def test_a_parameter_that_is_read_elsewhere_too_stays_apart():
    def function(params, x):
        penalty = jnp.sum(params["layers"][1]["bias"] ** 2)
        return plain(params, x) + penalty

    _, (params, _) = check(function, weights(), X)
    assert params["layers"][1]["bias"].dims.names == ("d_ff",)
    assert params["layers"][1]["w_in"] is None


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_calls_and_recomputed_layers_are_rolled(wrap):
    def inner(params, x):
        for layer in params["layers"]:
            x = jax.checkpoint(block)(layer, x) if wrap is jax.checkpoint else block(layer, x)
        return jnp.mean(x**2)

    check(inner if wrap is jax.checkpoint else wrap(inner), weights(), X)


def test_two_parameters_of_one_shape_are_told_apart_by_their_use():
    def function(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["a"]) @ layer["b"] + x
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    params = [
        {name: rng.standard_normal((EMBED, EMBED)).astype("float32") / 4 for name in "ab"}
        for _ in range(3)
    ]
    check(function, params, X, {"x": "batch length embed"}, loops=(3,))


def test_a_loop_is_told_of_and_so_is_that_there_is_none():
    program = md.from_jax(plain, NAMES, roll="layers")
    text = program.listing(weights(), X)
    assert "params/layers/*/w_in" in text
    assert "f32[layers=4, embed=8, d_ff=16]" in text
    with pytest.warns(UserWarning, match="has no equal layers, with parameters of their own"):
        md.from_jax(lambda x: jnp.sum(x), roll="layers").named(X)
    with pytest.raises(ValueError, match="roll is the name of a dim, such as 'layers', got 'a b'"):
        md.from_jax(plain, roll="a b")
    with pytest.raises(ValueError, match="roll='embed': a dim of the arguments has this name"):
        md.from_jax(plain, NAMES, roll="embed").named(weights(), X)


@pytest.mark.parametrize("way", ["jit", "cond", "scan"])
def test_layers_with_constants_of_their_own_in_inner_bodies_stay_apart(way):
    rng = np.random.default_rng(3)
    constants = [rng.standard_normal((EMBED, EMBED)).astype("float32") for _ in range(LAYERS)]

    def with_constant(constant):
        inner = jax.jit(lambda x: jnp.tanh(x @ constant))
        if way == "jit":
            return jax.jit(lambda x: inner(x) + x)
        if way == "cond":
            return lambda x: jax.lax.cond(jnp.sum(x) > 0, inner, lambda x: -inner(x), x)
        return lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, length=2)[0]

    functions = [with_constant(constant) for constant in constants]

    def function(params, x):
        for layer, own in zip(params["layers"], functions, strict=True):
            x = own(block(layer, x))
        return jnp.mean(x**2)

    program = md.from_jax(function, NAMES, roll="layers")
    with pytest.warns(UserWarning, match="no equal layers"):
        found = md.jit(program, backend="numpy")(weights(), X)
    np.testing.assert_allclose(float(found), function(weights(), X), rtol=1e-5)


def with_another(params, x):
    for number, layer in enumerate(params["layers"]):
        hidden = x @ layer["w_in"] + layer["bias"]
        hidden = jnp.sin(hidden) if number == 0 else jnp.tanh(hidden)  # the line that differs
        x = x + hidden @ layer["w_out"]
    return jnp.mean(x**2)


def with_one_more(params, x):
    for number, layer in enumerate(params["layers"]):
        x = x + jnp.tanh(x @ layer["w_in"]) @ layer["w_out"]
        if number == 0:
            x = jnp.exp(-x)  # the line that differs
    return jnp.mean(x**2)


def with_a_number(params, x):
    for layer, gain in zip(params["layers"], (params["out"][0, 0], 2.0), strict=True):
        x = x + gain * jnp.tanh(x @ layer["w_in"])[..., :EMBED]  # the line that differs
    return jnp.mean(x**2)


def narrower(params, x):
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w_in"]) @ layer["w_in"].T  # the line that differs
    return jnp.mean(x**2)


def apart(params, x):
    first, second = params["layers"]
    return jnp.mean(block({**second, "w_in": params["w_in"]}, block(first, x)) ** 2)


def with_keys(params, x):
    keys = jax.random.split(jax.random.key(0), len(params["layers"]))
    for number, layer in enumerate(params["layers"]):
        x = x + jax.random.normal(keys[number], x.shape)  # the line that differs
        x = x + jnp.tanh(x @ layer["w_in"]) @ layer["w_out"]
    return jnp.mean(x**2)


def with_a_place(params, x):
    for number, layer in enumerate(params["layers"]):
        x = x + jax.lax.slice_in_dim(x, number, number + 1, axis=1)  # the line that differs
        x = x + jnp.tanh(x @ layer["w_in"]) @ layer["w_out"]
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (with_keys, r".*key<fry>.*LINE.*"),
        (
            with_a_place,
            r"`slice` .* LINE, whose limit_indices and start_indices differ from those of .*",
        ),
        (with_another, r"`tanh` of f32\[8, 4, 16\] LINE, where the layer before has `sin` of .*"),
        (with_one_more, r"`integer_pow` of .*, where the layer before has `neg` of .* LINE"),
        (with_a_number, r"`mul` of f32\[\], f32\[8, 4, 8\] LINE, which reads from elsewhere .*"),
        (narrower, r"`dot_general` of .*f32\[8, 12\] LINE, where .*f32\[8, 16\].*"),
        (apart, r"params/layers/0/w_in, params/w_in cannot be one stack: .*"),
    ],
)
def test_the_first_difference_between_two_layers_is_named(function, what):
    params = weights(2)
    params["layers"][1]["w_in"] = params["layers"][1]["w_in"][
        :, : 12 if function is narrower else None
    ]
    line = r"at \S*test_rolling\.py:\d+  .*# the line that differs"
    params["w_in"] = params["layers"][1].pop("w_in") if function is apart else X[0, 0]
    found = f"stay apart; the first that differs: {what.replace('LINE', line)}$"
    with pytest.warns(UserWarning, match=found):
        md.from_jax(function, {}, roll="layers").inferred(params, X)


def test_layers_may_run_in_another_order_than_they_are_kept_in():
    def backwards(params, x):
        for layer in reversed(params["layers"]):
            x = block(layer, x)
        return jnp.mean(x**2)

    def by_name(params, x):
        for name in ("stem", "body", "head"):
            x = block(params[name], x)
        return jnp.mean(x**2)

    _, (params, _) = check(backwards, weights(), X)
    assert params["layers"][0]["bias"].dims.names == ("layers", "d_ff")
    named = dict(zip(("stem", "body", "head"), weights(3)["layers"], strict=True))
    names = {"params/stem/w_in": "embed d_ff", "x": "batch length embed"}
    check(by_name, named, X, names, loops=(3,))


def test_stacks_are_of_one_argument():
    def function(trained, frozen, x):
        for layer in [*frozen["layers"], *trained["layers"]]:
            x = block(layer, x)
        return jnp.mean(x**2)

    program = md.from_jax(function, {"x": "batch length embed"}, roll="layers")
    given = weights(2), weights(3, seed=1), X
    arguments = program.named(*given)
    dims = [each["layers"][0]["bias"].dims.names[0] for each in arguments[:2]]
    assert sorted(dims) == ["layers", "layers_2"]
    expected, slopes = jax.value_and_grad(function)(*given)
    value, gradients = md.jit(md.value_and_grad(program), backend="numpy")(*arguments)
    np.testing.assert_allclose(float(value), expected, rtol=1e-5)
    own = md.unnamed(program.unrolled(gradients))["layers"]
    for mine, theirs in zip(own, slopes["layers"], strict=True):
        np.testing.assert_allclose(mine["w_in"], theirs["w_in"], atol=1e-5)
    again = program.unrolled(arguments[1])["layers"]
    np.testing.assert_array_equal(np.asarray(again[2]["bias"]), given[1]["layers"][2]["bias"])


def test_results_of_layers_go_in_again_beside_stacks():
    def function(params, caches, x):
        after = []
        for layer, cache in zip(params["layers"], caches, strict=True):
            x = block(layer, x + cache)
            after.append(jnp.tanh(x))
        return x, after

    program = md.from_jax(function, NAMES, roll="layers")
    step = md.jit(program, backend="numpy")
    caches = [np.zeros(X.shape, "float32") for _ in range(LAYERS)]
    params, caches, _ = program.named(weights(), caches, X)
    ours = theirs = X
    expected = [np.zeros(X.shape, "float32") for _ in range(LAYERS)]
    for _ in range(2):
        ours, caches = step(params, caches, ours)
        theirs, expected = function(weights(), expected, theirs)
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-5)


def test_stacks_of_another_program_are_told_of():
    params, x = md.from_jax(plain, NAMES, roll="layers").named(weights(), X)
    fresh = md.from_jax(plain, NAMES, roll="layers")
    with pytest.raises(ValueError, match="plain has not made the stacks over `layers` that are"):
        md.jit(fresh)(params, x)
    with pytest.raises(ValueError, match="knows no stacks yet"):
        fresh.unrolled(params)
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (weights(), X))
    fresh.named(*specs)
    np.testing.assert_allclose(float(md.jit(fresh)(params, x)), plain(weights(), X), rtol=1e-5)
    state = fresh.unrolled({"mu": params, "count": 3})
    assert len(jax.tree.leaves(state)) == 3 * LAYERS + 3


def test_layers_with_other_names_are_not_alike():
    def function(params, x):
        for layer in params:
            x = jnp.tanh(jnp.tanh(x @ layer["a"]) @ layer["b"])
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_normal((EMBED, EMBED)).astype("float32") / 4  # noqa: E731
    params = [{"a": draw(), "b": draw()} for _ in range(3)]
    names = {"x": "batch length embed", "params/*/a": "embed d_ff", "params/*/b": "d_ff embed"}
    _, (named, _) = check(function, params, X, names, loops=(3,))
    assert named[0]["a"].dims.names == ("layers", "embed", "d_ff")
    check(function, params, X, {"x": "batch length embed"}, loops=(3,))
    own = [{n: md.named(a, f"{n}_in {n}_out".split()) for n, a in p.items()} for p in params[:1]]
    with pytest.raises(ValueError, match="contradict each other"):
        md.from_jax(function, names, roll="layers").named([*own, *params[1:]], X)


def test_a_sum_that_begins_with_a_number_is_carried():
    def function(params, x):
        total = 0.0
        for layer in params["layers"]:
            x = block(layer, x)
            total += jnp.mean(x**2)
        return total

    check(function, weights(), X)


@pytest.mark.long
def test_layers_with_a_derivative_of_their_own_are_rolled():
    @jax.custom_vjp
    def cubed(x):
        return x**3

    cubed.defvjp(lambda x: (x**3, x), lambda x, slope: (3 * x**2 * slope,))

    def function(params, x):
        for layer in params["layers"]:
            x = block(layer, 0.1 * cubed(x))
        return jnp.mean(x**2)

    check(function, weights(), X)


def test_a_step_whose_layers_are_read_twice_is_told_to_roll_the_loss():
    def deep(params, x):
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w_in"]) @ layer["w_out"]
        return jnp.mean(x**2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(deep)(params, x))

    program = md.from_jax(step, roll="layers")
    params = weights()
    x = np.ones((4, params["layers"][0]["w_in"].shape[0]), np.float32)
    with pytest.warns(UserWarning, match=r"Roll the loss, and take md\.value_and_grad"):
        named, _ = program.named(params, x)
    assert program.unrolled(named) is not None  # nothing is stacked, so nothing is to be done


def test_stacks_with_names_are_split_into_the_dims_that_were_said():
    def deep(params, x):
        for layer in params["layers"]:
            q, v = (jnp.reshape(x @ layer[name], (*x.shape[:2], 4, -1)) for name in "qv")
            scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, q))
            mixed = jnp.einsum("bhst,bthd->bshd", scores, v)
            x = x + mixed.reshape(x.shape) @ layer["o"]
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    layers = [{n: rng.normal(size=(16, 16)).astype("float32") for n in "qvo"} for _ in range(3)]
    names = {
        "x": "batch length embed",
        "params/layers/*/q": "embed (heads kv)",
        "params/layers/*/v": "embed (heads vo)",
    }
    x = rng.normal(size=(2, 6, 16)).astype("float32")
    layout = "heads:model; heads_kv:model; heads_vo:model"
    sent = []
    for roll in (None, "layers"):
        program = md.from_jax(deep, names, roll)
        lowered = md.jit(program, "model:4", layout).lower(*program.named({"layers": layers}, x))
        sent.append(sum(c.count for c in lowered.collectives))
    assert sent == [3, 3]  # one reduction for each layer, with heads split
