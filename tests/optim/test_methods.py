"""Methods of optimizers outside of a trace: as inside; and what they say of wrong arguments."""

import jax
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl import optim
from meshdsl.running import eager
from tests.optim import trees

RATE = optim.schedules.warmup_cosine(0.1, 2, 10)
OPTIMIZERS = {
    "Sgd": lambda: optim.Sgd(0.1),
    "Sgd, momentum": lambda: optim.Sgd(RATE, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": lambda: optim.AdamW(RATE, weight_decay=0.1),
    "Adafactor": lambda: optim.Adafactor(RATE, min_dim_size_to_factor=4, momentum=0.9),
    "Lion": lambda: optim.Lion(RATE, weight_decay=0.1),
    "Muon": lambda: optim.Muon(RATE),
    "FromOptax": lambda: optim.from_optax(optax.adamw(0.1)),
    "Ema": lambda: optim.Ema(optim.AdamW(RATE), decay=0.9),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees.arrays(tree))]


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@every
def test_methods_outside_of_a_trace_give_what_traced_ones_give(name):
    optimizer = OPTIMIZERS[name]()
    params, grads = trees.tree(0), trees.tree(1)
    state = optimizer.init(params)
    assert_equal(state, md.jit(optimizer.init)(params))
    found = optimizer.update(grads, state, params, 3)
    # A Python number is a step inside of a trace, too.
    traced = md.jit(lambda g, s, p: optimizer.update(g, s, p, step=3))
    assert_equal(found, traced(grads, state, params))


@pytest.mark.parametrize("step", [3, np.int64(3), np.array(3), jax.numpy.int32(3), md.named(3, [])])
def test_whole_numbers_of_any_kind_are_steps(step):
    g, p = md.named([1.0, -1.0], ["embed"]), md.named([2.0, 3.0], ["embed"])
    found, _ = optim.Sgd(RATE).update(g, optim.SgdState(None), p, step)
    np.testing.assert_allclose(
        np.asarray(found), np.array([2.0, 3.0]) - np.array([1, -1]) * float(RATE(3))
    )


def test_one_program_serves_all_steps():
    optimizer, params = optim.AdamW(RATE), trees.tree(0)
    state = optimizer.init(params)
    for number in range(4):
        params, state = optimizer.update(trees.tree(1 + number), state, params, number)
        if number == 1:  # the first has parameters that are not on a device
            known = len(eager._programs)
    assert len(eager._programs) == known


def test_outside_of_a_trace_a_state_lies_like_its_parameters():
    params = md.place(trees.tree(0), *trees.SHARDED)
    optimizer = optim.AdamW(0.1)
    state = optimizer.init(params)
    after, state = optimizer.update(md.place(trees.tree(1), *trees.SHARDED), state, params, 0)
    for path in ("query", "w_in"):
        wanted = params["blocks"][path].layout
        assert wanted.splits
        assert after["blocks"][path].layout == wanted
        assert state.mean.params["blocks"][path].layout == wanted


def differently(params):
    """Returns parameters that lie differently along each dim, with what each lies like."""
    rules = "embed:data; hidden:model; w2/hidden:data; w2/embed:-; z/embed:model; z/hidden:-"
    placed = md.place(params, "data:2,model:4", f"{rules}; odd/hidden:data; odd/odd:model")
    lie = {name: placed[name].layout for name in placed}
    assert len(set(lie.values())) == 4
    return placed, lie


def of_shapes(seed):
    embed, hidden, odd = md.dims(embed=8, hidden=16, odd=3)
    shapes = {"w1": [embed, hidden], "w2": [hidden, embed], "z": [embed, hidden]}
    shapes |= {"odd": [odd, md.Dimension("hidden", 5)]}  # 5 positions over 2: with pads
    rng = np.random.default_rng(seed)
    drawn = {n: rng.standard_normal([d.size for d in s]) for n, s in shapes.items()}
    return {name: md.named(drawn[name].astype("float32"), shapes[name]) for name in shapes}


@pytest.mark.long
@every
def test_parameters_that_lie_differently_along_a_dim_stay_where_they_are(name):
    optimizer = OPTIMIZERS[name]()
    params, grads = of_shapes(0), of_shapes(1)
    expected = optimizer.init(params)
    placed, lie = differently(params)
    state = optimizer.init(placed)
    assert_equal(trees.arrays(state), trees.arrays(expected))

    def assert_in_place(params, state):
        assert {name: params[name].layout for name in params} == lie
        keyed, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=trees_end)
        for keys, leaf in keyed:
            wanted = lie.get(keys[-1].key if hasattr(keys[-1], "key") else "")
            if wanted is not None:
                assert leaf.layout == wanted.restrict(leaf.dims.names), keys

    assert_in_place(placed, state)
    for number, g in enumerate([grads, differently(grads)[0]]):
        params, expected = optimizer.update(grads, expected, params, number)
        placed, state = optimizer.update(g, state, placed, number)
        assert_in_place(placed, state)
    assert_equal(trees.arrays((placed, state)), trees.arrays((params, expected)))


def trees_end(value):
    return isinstance(value, md.Tensor)


def test_an_update_of_parameters_that_lie_differently_sends_nothing():
    params, _ = differently(of_shapes(0))
    optimizer = optim.AdamW(RATE)
    eager.clear_cache()
    optimizer.update(params, optimizer.init(params), params, 0)
    sent = [op for each in eager._programs.values() for op in each.program.collectives]
    assert sent == []


def test_states_keep_layouts_of_their_own():
    params, _ = differently(of_shapes(0))
    optimizer = optim.AdamW(0.1)
    state = optimizer.init(params)
    own = md.place(state.mean, "data:2,model:4", "embed:model; hidden:data")
    new, after = optimizer.update(params, optim.AdamState(own, state.mean_square), params, 0)
    for name in params:
        assert new[name].layout == params[name].layout
        assert after.mean.params[name].layout == own.params[name].layout
        assert after.mean_square.params[name].layout == params[name].layout


def test_functions_of_trees_leave_parameters_where_they_are():
    params, lie = differently(of_shapes(0))
    zeros = optim.zeros_like(params)
    clipped, _ = optim.clip_by_global_norm(params, 1.0)
    new, (moved,) = optim.update_each(lambda _, g, z, p: (p - g, z + g), params, clipped, zeros)
    for tree in (zeros.params, clipped, new, moved.params):
        assert {name: tree[name].layout for name in tree} == lie
    # A tensor is a tree, too, and so is a parameter without a place.
    w = params["w2"]
    assert optim.zeros_like(w).params.layout == w.layout
    assert optim.Sgd(0.1).update(w, optim.SgdState(None), w, 0)[0].layout == w.layout


def test_an_optimizer_of_ones_own_runs_outside_of_a_trace():
    def step(path, g, velocity, p):
        velocity = 0.9 * velocity + g
        return p - 0.1 * velocity, velocity

    params, g = {"w": md.ones(md.dims(embed=2))}, {"w": md.named([1.0, -1.0], ["embed"])}
    new, (velocity,) = optim.update_each(step, params, g, optim.zeros_like(params))
    np.testing.assert_allclose(np.asarray(new["w"]), [0.9, 1.1], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(velocity.params["w"]), [1, -1])


def test_clipping_runs_outside_of_a_trace():
    grads = {"w": md.named([3.0, 0.0], ["embed"]), "bias": md.named(4.0, [])}
    assert float(optim.global_norm(grads)) == 5.0
    clipped, norm = optim.clip_by_global_norm(grads, norm=None, max_norm=1.0)
    np.testing.assert_allclose(np.asarray(clipped["w"]), [0.6, 0], rtol=1e-6)
    assert float(norm) == 5.0


@pytest.mark.parametrize("make", [
    lambda: optim.schedules.constant(0.5),
    lambda: optim.schedules.linear(0.0, 1.0, 4),
    lambda: optim.schedules.warmup_stable_decay(1.0, 2, 2, 8),
    lambda: optim.schedules.warmup_inverse_square_root(1.0, 3),
    lambda: optim.schedules.by_name("cosine", 1.0, 2, 6),
])  # fmt: skip
def test_schedules_take_python_numbers(make):
    rate, x = make(), md.ones(md.dims(embed=2))
    for step in (0, 1, 5):
        expected = np.asarray(rate(md.named(step, [])))
        np.testing.assert_allclose(np.asarray(rate(step)), expected, rtol=1e-6)
        traced = md.jit(lambda x, at=step: x * rate(at))(x)
        np.testing.assert_allclose(np.asarray(traced), [expected] * 2, rtol=1e-6)
    ramp = rate(md.named(np.arange(3), ["steps"]))  # many at once, to plot them
    np.testing.assert_allclose(np.broadcast_to(ramp, [3])[1], np.asarray(rate(1)), rtol=1e-6)


# What they say of wrong arguments.

NAMED = "name the dims of arrays, as in md.named(array, dims); numbers have none"


def refusal(call):
    """Returns the error's first line, and checks that it ends with the caller's line."""
    with pytest.raises(ValueError) as error:
        call()
    first, *_, last = str(error.value).split("\n")
    assert last.startswith("  at ") and "test_methods.py" in last, last
    return first


@every
def test_each_method_names_itself_and_what_is_wrong(name):
    optimizer = OPTIMIZERS[name]()
    owner = name.partition(",")[0]
    params, grads = trees.tree(0), trees.tree(1)
    state = optimizer.init(params)
    unnamed = {"w": np.ones((4, 6))}
    assert refusal(lambda: optimizer.init(unnamed)).startswith(
        f"{owner}.init: params/w is ndarray[4, 6], not a tensor: {NAMED}"
    )

    def update(grads, state, params, step):
        return refusal(lambda: optimizer.update(grads, state, params, step))

    assert update(unnamed, state, params, 0).startswith(
        f"{owner}.update: grads/w is ndarray[4, 6], not a tensor: {NAMED}"
    )
    renamed = {**grads, "scale": grads["scale"].rename(embed="other")}
    assert update(renamed, state, params, 0) == (
        f"{owner}.update: grads/scale is f32[other=8], but params/scale is f32[embed=8]; "
        "grads is a tree like params"
    )
    assert update({"blocks": grads["blocks"], "shift": grads["scale"]}, state, params, 0) == (
        f"{owner}.update: grads/scale is missing; there is no params/shift for grads/shift; "
        "grads is a tree like params"
    )
    step = "step is the number of steps before this one, a whole number or a tensor s32[], not"
    assert update(grads, state, params, 0.5) == f"{owner}.update: {step} float 0.5"
    assert update(grads, state, params, True) == f"{owner}.update: {step} bool"
    many = md.named([0, 1], ["steps"])
    assert update(grads, state, params, many) == (
        f"{owner}.update: step is the number of one step, without dims, not [steps=2]"
    )
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'step'"):
        optimizer.update(grads, state, params)


def test_a_state_of_another_optimizer_or_of_other_parameters_is_refused():
    params, grads = trees.tree(0), trees.tree(1)
    adamw = optim.AdamW(0.1)
    assert refusal(lambda: adamw.update(grads, optim.Lion(0.1).init(params), params, 0)) == (
        "AdamW.update: state is LionState, not AdamState: give what `init` or the `update` before "
        "returned"
    )
    other = adamw.init({"scale": params["scale"]})
    first = refusal(lambda: adamw.update(grads, other, params, 0))
    assert first.startswith("AdamW.update: state/mean/params/blocks/bias is missing; ")
    assert first.endswith("state/mean/params is a tree like params")
    wide = {**params, "scale": md.zeros(md.dims(embed=9))}
    assert refusal(lambda: adamw.update(grads, adamw.init(wide), params, 0)) == (
        "AdamW.update: state/mean/params/scale is f32[embed=9], but params/scale is f32[embed=8]; "
        "state/mean/params is a tree like params"
    )


def test_trees_and_schedules_name_themselves():
    unnamed = {"w": np.ones(3), "b": 0.5}
    both = "tree/b is float; tree/w is ndarray[3], not a tensor"
    assert refusal(lambda: optim.global_norm(unnamed)).startswith(f"global_norm: {both}")
    assert refusal(lambda: optim.clip_by_global_norm(unnamed, 1.0)).startswith(
        f"clip_by_global_norm: {both}"
    )
    assert refusal(lambda: optim.zeros_like(unnamed)).startswith("zeros_like: params/b is float; ")
    assert refusal(lambda: optim.update_each(lambda *_: (), unnamed, {})).startswith(
        "update_each: params/b is float; "
    )
    assert refusal(lambda: optim.schedules.linear(0.0, 1.0, 4)("3")).endswith("s32[], not str")
    assert refusal(lambda: RATE(2.5)).startswith("schedules.warmup_cosine: step is ")


class Recent:
    """An optimizer of a user, whose state has a dim that no parameter has."""

    learning_rate = 0.1

    def init(self, params):
        return optim.zeros_like(params, lambda _, dims: md.Shape((*dims, *md.dims(history=2))))

    def update(self, grads, state, params, step):
        def one(path, g, h, p):
            return p - 0.1 * md.sum(h + g, "history"), h + g

        params, (state,) = optim.update_each(one, params, grads, state)
        return params, state


def test_averages_leave_the_state_inside_to_its_optimizer():
    x, g = md.named([1.0, 2.0], ["embed"]), md.named([1.0, 0.0], ["embed"])
    optimizer = optim.Ema(Recent(), decay=0.9)
    state = optimizer.init({"w": x})
    for update in (optimizer.update, md.jit(optimizer.update)):
        after, own = update({"w": g}, state, {"w": x}, 0)
        np.testing.assert_allclose(np.asarray(after["w"]), [0.8, 2.0], rtol=1e-6)
        np.testing.assert_allclose(np.asarray(own.inner.params["w"]), [[1, 1], [0, 0]])
    # Its own averages are checked, and so is the state inside, by an optimizer of ours.
    params = {"w": x}
    other = optim.EmaState(optim.Mirror({"v": x}), state.inner)
    assert refusal(lambda: optimizer.update({"w": g}, other, params, 0)).startswith(
        "Ema.update: state/ema/params/w is missing; "
    )
    ours = optim.Ema(optim.AdamW(0.1))
    wrong = optim.EmaState(ours.init(params).ema, optim.AdamW(0.1).init({"v": x}))
    assert "state/mean/params/w is missing" in refusal(
        lambda: ours.update({"w": g}, wrong, params, 0)
    )


@pytest.mark.parametrize("name", ["Sgd", "Sgd, momentum", "AdamW", "Lion", "Ema"])
def test_gradients_may_lack_dims_of_their_parameters(name):
    optimizer = OPTIMIZERS[name]()
    layers, embed = md.dims(layers=3, embed=4)
    x = md.named(np.arange(12, dtype="float32").reshape(3, 4), [layers, embed])
    ones = md.ones([layers, embed])
    for small in (md.named(np.float32(0.5), []), md.named(np.arange(4, dtype="float32"), [embed])):
        state = optimizer.init({"w": x})
        full = optimizer.update({"w": ones * small}, state, {"w": x}, 1)
        for update in (optimizer.update, md.jit(optimizer.update)):
            assert_equal(update({"w": small}, state, {"w": x}, 1), full)
    wide = md.ones([layers, embed, md.Dimension("other", 2)])
    assert "grads/w is f32[layers=3, embed=4, other=2], but" in refusal(
        lambda: optimizer.update({"w": wide}, optimizer.init({"w": x}), {"w": x}, 1)
    )


def test_a_step_that_jax_traces_is_one_without_dims():
    g, p = md.named([1.0, -1.0], ["embed"]), md.named([2.0, 3.0], ["embed"])
    sgd, empty = optim.Sgd(RATE), optim.SgdState(None)
    expected = np.asarray(sgd.update(g, empty, p, 3)[0])

    @jax.jit
    def update(step):
        return sgd.update(g, empty, p, step)[0].data

    np.testing.assert_allclose(update(3), expected, rtol=1e-6)
    assert float(jax.jit(lambda step: RATE(step).data)(3)) == pytest.approx(float(RATE(3)))
    assert "s32[], not f64[] of JAX" in refusal(lambda: update(3.0))
    assert "s32[], not s32[2] of JAX" in refusal(lambda: update(np.zeros(2, "int32")))
    inside = jax.jit(lambda step: md.jit(lambda p: sgd.update(g, empty, p, step)[0])(p).data)
    with pytest.raises(ValueError, match="make it an argument of that function"):
        inside(3)


@pytest.mark.parametrize("step", [2**31, -(2**31) - 1, np.int64(2**31)])
def test_steps_are_of_32_bits(step):
    g = md.named([1.0, -1.0], ["embed"])
    assert refusal(lambda: optim.Sgd(RATE).update(g, optim.SgdState(None), g, step)) == (
        f"Sgd.update: step is a number of 32 bits, at most 2147483647, not {step}"
    )
    assert "at most 2147483647" in refusal(lambda: RATE(step))
