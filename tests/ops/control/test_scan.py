"""Scan: values, gradients and gradients of gradients are those of the loop written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import arrays_of, assert_agree, assert_close, message, random, run

steps, a, b = md.dims(steps=4, a=3, b=2)


def inputs():
    """Returns a carry, xs and a weight."""
    return random([a]), random([steps, a], seed=1), random([a, b], seed=2)


def cell(carry, x, w):
    """A step with carry, slice and a captured tensor: returns the next carry and an output."""
    mixed = md.einsum(md.einsum(carry, w, over="a"), w, over="b")
    carry = md.tanh(mixed + carry * x)
    return carry, md.sin(x) * carry


def jax_cell(carry, x, w):
    carry = jnp.tanh(w @ (carry @ w) + carry * x)
    return carry, jnp.sin(x) * carry


@pytest.mark.long
@pytest.mark.parametrize("reverse", [False, True])
def test_carry_slices_consts_and_outputs_with_two_derivatives(reverse):
    def ours(carry, xs, w):
        end, ys = md.scan(lambda c, x: cell(c, x, w), carry, xs, "steps", reverse)
        return ys + end

    def theirs(carry, xs, w):
        end, ys = jax.lax.scan(lambda c, x: jax_cell(c, x, w), carry, xs, reverse=reverse)
        return ys + end

    assert_agree(ours, theirs, *inputs(), order=2)


def test_only_the_outputs_matter():
    assert_agree(
        lambda c, xs, w: md.scan(lambda c, x: cell(c, x, w), c, xs, "steps")[1],
        lambda c, xs, w: jax.lax.scan(lambda c, x: jax_cell(c, x, w), c, xs)[1],
        *inputs(),
        order=2,
    )


def test_only_the_carry_matters():
    assert_agree(
        lambda c, xs, w: md.scan(lambda c, x: (cell(c, x, w)[0], None), c, xs, "steps")[0],
        lambda c, xs, w: jax.lax.scan(lambda c, x: (jax_cell(c, x, w)[0], None), c, xs)[0],
        *inputs(),
        order=2,
    )


def test_the_stacked_dim_may_stand_anywhere():
    xs = random([a, steps, b], seed=1)

    def ours(carry, xs):
        return md.scan(lambda c, x: (c * 0.5 + md.sum(x, "b"), x * c), carry, xs, steps)[1]

    def theirs(carry, xs):
        def body(c, x):
            return c * 0.5 + x.sum(1), x * c[:, None]

        return jax.lax.scan(body, carry, jnp.moveaxis(xs, 1, 0))[1]

    assert_agree(ours, theirs, random([a]), xs, order=2)


@pytest.mark.long
def test_trees_go_through():
    carry, _, w = inputs()

    def ours(carry, xs, w):
        def body(state, slices):
            left = state["left"] * slices[0] + slices[1]["w"].sum()
            return {"left": left, "right": (state["right"][0] + left,)}, {"y": left}

        stacked = (xs, {"w": w.rename(a="steps")})
        start = {"left": carry, "right": (carry,)}
        end, ys = md.scan(body, start, stacked, "steps")
        return end["right"][0] + ys["y"]

    def theirs(carry, xs, w):
        left = right = carry
        ys = []
        for x, row in zip(xs, w, strict=True):
            left = left * x + row.sum()
            right = right + left
            ys.append(left)
        return right + jnp.stack(ys)

    assert_agree(ours, theirs, carry, random([md.Dimension("steps", 3), a]), w, order=2)


def test_a_dim_without_slices_gives_the_length():
    def ours(x):
        return md.scan(lambda c, _: (c * c, None), x, None, md.Dimension("steps", 3))[0]

    assert_agree(ours, lambda x: x**8, random([a], 0.5, 1.5), order=2)


@pytest.mark.long
def test_integer_carries_count_and_do_not_hinder_gradients():
    def ours(carry, xs):
        def body(state, x):
            value, count = state
            return (value * md.cast(count, "float64") + x, count + 2), count

        (end, count), counts = md.scan(body, (carry, md.full([], 1, "int32")), xs, "steps")
        total = end + md.cast(count, "float64")
        return md.outer(md.add, total, md.cast(counts, "float64"))

    def theirs(carry, xs):
        for i, x in enumerate(xs):
            carry = carry * (1 + 2 * i) + x
        return carry[:, None] + 9 + (1 + 2 * jnp.arange(4.0))

    assert_agree(ours, theirs, random([a]), random([steps, a]), order=2)


def test_integer_slices_index_captured_tables():
    rows = md.named(np.array([2, 0, 2, 1], np.int32), [steps])

    def ours(table, rows):
        return md.scan(lambda c, i: (c * md.take(table, i, "a"), None), md.ones([b], "float64"),
                       rows, "steps")[0]  # fmt: skip

    assert_agree(
        ours, lambda t, r: jnp.prod(t[np.array([2, 0, 2, 1])], 0), random([a, b]), rows, order=2
    )


@pytest.mark.long
def test_scans_nest():
    inner = md.Dimension("inner", 3)
    xs = random([steps, inner, a], seed=3)

    def ours(carry, xs, w):
        def outer(c, x):
            c, ys = md.scan(lambda c, x: cell(c, x, w), c, x, "inner", reverse=True)
            return c * 0.9, ys.sum("inner")

        end, ys = md.scan(outer, carry, xs, "steps")
        return ys + end

    def theirs(carry, xs, w):
        def outer(c, x):
            c, ys = jax.lax.scan(lambda c, x: jax_cell(c, x, w), c, x, reverse=True)
            return c * 0.9, ys.sum(0)

        end, ys = jax.lax.scan(outer, carry, xs)
        return ys + end

    assert_agree(ours, theirs, random([a]), xs, random([a, b], seed=2), order=2)


@pytest.mark.long
@pytest.mark.parametrize("where", ["inside", "outside", "both"])
def test_checkpoint_and_scan_compose(where):
    def ours(carry, xs, w):
        step = lambda c, x: cell(c, x, w)  # noqa: E731
        if where != "outside":
            step = md.checkpoint(step)

        def whole(carry, xs):
            return md.scan(step, carry, xs, "steps")

        end, ys = (whole if where == "inside" else md.checkpoint(whole))(carry, xs)
        return ys + end

    def theirs(carry, xs, w):
        end, ys = jax.lax.scan(lambda c, x: jax_cell(c, x, w), carry, xs)
        return ys + end

    assert_agree(ours, theirs, *inputs(), order=2)


def test_a_body_may_use_tensors_that_have_the_scanned_dim():
    """What the backward pass reads of them is stacked under another name of that dim."""

    def ours(carry, xs):
        def body(c, x):
            every = md.tanh(xs * c + x)  # [steps, a], in each step
            return c + md.mean(md.square(every), "steps"), None

        return md.scan(body, carry, xs, "steps")[0]

    def theirs(carry, xs):
        for x in xs:
            carry = carry + jnp.square(jnp.tanh(xs * carry + x)).mean(0)
        return carry

    assert_agree(ours, theirs, random([a]), random([steps, a], seed=1), order=2)


def test_a_carry_may_have_the_scanned_dim():
    def ours(carry, xs):
        return md.scan(lambda c, x: (md.sin(c) * x, None), carry, xs, "steps")[0]

    def theirs(carry, xs):
        for x in xs:
            carry = jnp.sin(carry) * x
        return carry

    assert_agree(ours, theirs, random([steps, a]), random([steps, a], seed=1), order=2)


def test_a_passed_on_input_has_its_gradient():
    assert_agree(
        lambda c, xs: sum_of(md.scan(lambda c, x: (x, c), c, xs, "steps")),
        lambda c, xs: xs[-1] + jnp.concatenate([c[None], xs[:-1]]),
        random([a]),
        random([steps, a], seed=1),
        order=2,
    )


def sum_of(pair):
    end, ys = pair
    return ys + end


def test_stop_gradient_in_the_body():
    def ours(carry, xs):
        return md.scan(lambda c, x: (md.stop_gradient(c) * x + c, None), carry, xs, "steps")[0]

    def theirs(carry, xs):
        for x in xs:
            carry = jax.lax.stop_gradient(carry) * x + carry
        return carry

    assert_agree(ours, theirs, random([a]), random([steps, a], seed=1))


def test_what_no_result_needs_is_not_computed():
    def model(carry, xs):
        def body(state, x):
            kept, unused = state
            return (kept + x, md.exp(unused)), md.sin(unused)

        return md.scan(body, (carry, carry), xs, "steps")[0][0]

    program = md.jit(model, backend="numpy").lower(random([a]), random([steps, a]))
    (scan,) = [i for i in program.block.instructions if i.op == "scan"]
    assert [i.op for i in scan.body.instructions] == ["add"]


def test_program_size_does_not_grow_with_the_length():
    sizes = []
    for length in (4, 48):
        dim = md.Dimension("steps", length)
        graph = md.jit(
            md.grad(lambda c, xs, w: md.sum(md.scan(lambda c, x: cell(c, x, w), c, xs, "steps")[0]))
        ).trace(md.spec([a], "float64"), md.spec([dim, a], "float64"), md.spec([a, b], "float64"))
        sizes.append(str(graph).count("\n"))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize("layout", ["steps:x; a:y", "a:x+y", "b:y; a:x", "steps:y+x; b:x?"])
def test_layouts_change_nothing(layout, backend):
    def model(carry, xs, w):
        def loss(carry, xs, w):
            end, ys = md.scan(lambda c, x: cell(c, x, w), carry, xs, "steps", reverse=True)
            return md.sum(end) + md.sum(md.square(ys))

        return md.value_and_grad(loss, (0, 1, 2))(carry, xs, w)

    four = md.Dimension("a", 4)
    given = random([four]), random([steps, four], seed=1), random([four, b], seed=2)
    expected = arrays_of(run(model, *given))
    # `steps:x` would make a pipeline of the steps: `xs` has a gradient, as weights of layers have.
    no_pipeline = md.Options(pipeline="none")
    found = run(model, *given, mesh="x:2,y:2", layout=layout, backend=backend, options=no_pipeline)
    for mine, want in zip(arrays_of(found), expected, strict=True):
        assert_close(mine, want)


# Mistakes.


def test_a_carry_that_changes_is_told_by_its_path():
    def model(x):
        def body(state, x):
            return {"m": md.cast(state["m"], "float32"), "v": state["v"] + x}, None

        return md.scan(body, {"m": x.sum("a"), "v": x.sum(["a", "steps"])}, x, "steps")

    text = message(model, random([steps, a]))
    line = model.__code__.co_firstlineno + 2
    assert "scan: the carry must keep its dims and dtypes: " in text
    assert "carry/m goes in as f64[steps=4] and comes out as f32[steps=4] (made at " in text
    assert f"test_scan.py:{line}); cast it: md.cast(x, 'float64'); carry/v goes in as f64[]" in text
    assert "comes out as f64[a=3] (made at " in text
    assert "return it with the dims it came in, or as what the loop stacks" in text


def test_a_carry_with_another_name_is_told_how_to_be_renamed():
    embed, features = md.dims(embed=3, features=3)
    weights = random([steps, embed, features])

    def model(x):
        return md.scan(lambda h, w: (md.einsum(h, w, over="embed"), None), x, weights, "steps")

    assert "x.rename(features='embed')" in message(model, random([embed]))


def test_other_mistakes_are_told():
    x = random([steps, a])
    for function, text in [
        (
            lambda x: md.scan(lambda c, x: c, x.sum("steps"), x, "steps"),
            "scan: the body must return a pair: (carry, slice of ys)",
        ),
        (
            lambda x: md.scan(lambda c, x: ((c, c), None), x.sum("steps"), x, "steps"),
            "the body returns a carry of another structure",
        ),
        (
            lambda x: md.scan(lambda c, x: (c, None), x, [x, x.sum("steps"), x.sum()], "steps"),
            "xs/1: f64[a=3] has no dim `steps`; xs/2: f64[] has no dim `steps`",
        ),
        (
            lambda x: md.scan(
                lambda c, x: (c, None),
                x,
                [x, x.split("steps", [md.Dimension("steps", 2), b])],
                "steps",
            ),
            "dim `steps` has several sizes: [2, 4]",
        ),
        (
            lambda x: md.scan(lambda c, x: (c, None), x, None, "steps"),
            "nothing gives dim 'steps' a size; pass a md.Dimension",
        ),
        (
            lambda x: md.scan(lambda c, s: (c, [s, x]), x, x, "steps"),
            "ys are stacked along `steps`, which they have already; rename that dim in the body: "
            "ys/1: f64[steps=4, a=3] (made at ",
        ),
    ]:
        assert text in message(function, x)


# Map.


def test_map_stacks_what_a_function_gives_of_every_slice():
    def ours(xs, w):
        def one(tree):
            return {"y": md.tanh(md.einsum(tree["x"], w, over="a")), "n": md.sum(tree["x"])}

        found = md.map(one, {"x": xs}, "steps")
        return found["y"] * found["n"]

    def theirs(xs, w):
        return jnp.tanh(xs @ w) * xs.sum(1, keepdims=True)

    _, xs, w = inputs()
    assert_agree(ours, theirs, xs, w, order=2)
    for backend in ("numpy", "jax"):
        found = run(ours, xs, w, mesh="x:3", layout="steps:x; b:x?", backend=backend)
        assert_close(found, theirs(xs.data, w.data))


def test_map_tells_mistakes_as_its_own():
    text = message(lambda x: md.map(lambda x: x, x, "step"), random([steps, a]))
    assert "map: xs: f64[steps=4, a=3] has no dim `step`" in text
    text = message(lambda x: md.map(lambda _: x, x, "steps"), random([steps, a]))
    assert "map: ys are stacked along `steps`, which they have already" in text


@pytest.mark.long
def test_several_carries_of_all_kinds_in_reverse_on_layouts_that_do_not_divide():
    five, odd = md.dims(five=5, odd=3)
    xs = {"x": random([five, odd], seed=1), "i": md.named(np.arange(5, dtype=np.int32), [five])}

    def ours(start, xs):
        def body(carry, x):
            (total, count), mean = carry
            total = total * 0.5 + md.sin(x["x"]) * mean
            mean = mean + md.mean(total) * md.cast(x["i"], "float64")
            return ((total, count + x["i"]), mean), (total * mean, [count])

        start = ((start, md.full([], 0, "int32")), md.sum(start))
        ((total, count), mean), (ys, [counts]) = md.scan(body, start, xs, five, reverse=True)
        return ys + total * mean + md.cast(counts + count, "float64")

    def theirs(start, xs):
        def body(carry, x):
            (total, count), mean = carry
            total = total * 0.5 + jnp.sin(x["x"]) * mean
            mean = mean + total.mean() * x["i"]
            return ((total, count + x["i"]), mean), (total * mean, count)

        start = ((start, jnp.int32(0)), start.sum())
        ((total, count), mean), (ys, counts) = jax.lax.scan(body, start, xs, reverse=True)
        return ys + total * mean + (counts + count)[:, None]

    def flat(start, x, i):
        return ours(start, {"x": x, "i": i})

    start = random([odd])
    expected = theirs(start.data, {"x": xs["x"].data, "i": xs["i"].data})
    assert_agree(
        flat, lambda s, x, i: theirs(s, {"x": x, "i": jnp.asarray(i)}), start, *xs.values()
    )
    for backend in ("numpy", "jax"):
        for layout in ("odd:x; five:y", "five:x+y"):
            found = run(ours, start, xs, mesh="x:2,y:2", layout=layout, backend=backend)
            assert_close(found, expected)


@pytest.mark.parametrize(
    "largest",
    [
        lambda x: md.max(x, "b"),
        lambda x: md.min(x, "b"),
        lambda x: md.sum(md.max_pool(x, {"b": 3}, {"b": 1})),
        lambda x: md.sum(
            md.segment_max(x, md.arange(md.Dimension("b", 6)) // 3, md.Dimension("s", 2))
        ),
    ],
)
def test_a_gradient_compares_an_operand_with_the_maximum_of_itself(largest):
    """Of an operand that is computed again, rounded otherwise, no element may be the maximum."""
    steps, b = md.dims(steps=4, b=6)

    def loss(x, ws):
        def body(carry, w):
            y = x + md.sin(x * w) * 0.3  # which compilers round as a multiply-add, or not
            return carry + md.square(largest(y)), None

        return md.scan(body, md.zeros([], "float64"), ws, "steps")[0]

    graph = md.jit(md.grad(loss)).trace(md.spec([b], "float64"), md.spec([steps], "float64"))
    forward, backward = (op.bodies[0] for op in graph.operations if op.name == "scan")
    (kind,) = {op.name for op in forward.operations if op.primitive.combines in ("max", "min")}
    (again,) = (op for op in backward.operations if op.name == kind)
    behind = [op.outputs for op in backward.operations if op.name == "barrier"]  # all read these
    assert any(again.inputs[0] is t for tensors in (backward.inputs, *behind) for t in tensors)
