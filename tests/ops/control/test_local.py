"""Operations of a user's own: what they compute and move, their gradients, and their mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition import Strategy
from tests.ops.agreement import arrays_of, assert_agree, assert_close, message, random, run

a, b, c = md.dims(a=7, b=4, c=6)
LAYOUTS = [("x:2,y:2", "a:x; b:y"), ("x:2,y:2", "b:y; a:x+y?"), ("x:4", "a:x"), ("x:8", "a:x")]
BACKENDS = ["numpy", "jax", "tf"]


def normalised(x, scale):
    return x / jnp.sqrt((x * x).sum(1, keepdims=True)) * scale


def weighted(x, scale):
    return jnp.log(x * x + 1) @ scale


def of_rows(x, scale):
    return md.local(normalised, x, scale, out=[a, b], split="a")


def of_sums(x, scale):
    return md.local(weighted, x, scale, out=["a"], split="a", sums="b")


def everything(function):
    """Returns the value, first and second derivatives of a function of two tensors."""

    def loss(x, scale):
        return md.sum(md.sin(function(x, scale)))

    def slope(x, scale):
        return md.sum(md.sin(md.grad(loss)(x, scale)))

    return lambda x, s: (function(x, s), md.grad(loss, (0, 1))(x, s), md.grad(slope, (0, 1))(x, s))


@pytest.mark.long
@pytest.mark.parametrize(("function", "reference"), [(of_rows, normalised), (of_sums, weighted)])
def test_local_computes_what_the_function_does(function, reference):
    """The gradients are those of JAX, twice."""
    inputs = random([a, b]), random([b], seed=1)
    assert_agree(function, reference, *inputs, order=2)
    expected = arrays_of(run(everything(function), *inputs))
    for backend in BACKENDS:
        # What runs on devices takes seconds to compile for each layout.
        for mesh, layout in LAYOUTS if backend == "numpy" else LAYOUTS[1:2]:
            found = run(everything(function), *inputs, mesh=mesh, layout=layout, backend=backend)
            for mine, other in zip(arrays_of(found), expected, strict=True):
                assert_close(mine, other)


def test_local_moves_only_what_must_be_whole():
    even = random([c, b]), random([b])

    def rows(x, scale):
        return md.local(normalised, x, scale, out=[c, b], split="c")

    def sums(x, scale):
        return md.local(weighted, x, scale, out=["c"], split="c", sums="b")

    def collectives(function, layout):
        program = md.jit(function, "x:2,y:2", layout).lower(*even)
        return [(one.kind, *one.axes) for one in program.collectives]

    assert collectives(rows, "c:x") == []
    assert collectives(rows, "c:x; b:y") == [("all_gather", "y")]  # of both, joined
    assert collectives(sums, "c:x; b:y") == [("all_reduce", "y")]


def test_several_results_and_integers():
    def parts(x, n):
        return jnp.where(n[:, None] > 2, x, 0), (x * x).sum(1).astype(jnp.float32)

    def program(x, n):
        kept, squares = md.local(
            parts, x, n, out=(["a", "b"], ["a"]), dtype=("float64", "float32"), split="a"
        )
        return md.sum(kept * kept) + md.sum(squares.cast("float64"))

    x, n = random([a, b]), md.named(np.arange(7, dtype=np.int32), [a])
    expected = jax.grad(lambda x: (parts(x, n.data)[0] ** 2).sum() + (x * x).sum())(x.data)
    for backend in BACKENDS:
        found = run(md.grad(program), x, n, mesh="x:4", layout="a:x", backend=backend)
        assert_close(found, expected, 1e-6)


def test_a_result_may_have_another_dim():
    twice = md.Dimension("twice", 8)
    x = random([a, b])
    found = md.local(lambda x: jnp.tile(x, 2), x, out=["a", twice], split="a")
    assert_close(found, np.tile(x.data, 2))


def test_a_function_of_numpy_arrays_will_do_on_numpy():
    x = random([a, b])
    found = run(lambda x: md.local(np.cbrt, x, out=x.dims, split=["a", "b"]), x)
    assert_close(found, np.cbrt(x.data))


# Primitives.

scaled = md.primitive(
    "scaled",
    shape=lambda x, *, by: x.dims,
    emitters={"jax": lambda x, *, by: x * by, "numpy": lambda x, *, by: x * by},
    gradient=lambda g, y, x, *, by: scaled(g, by=by),
    partition=md.Partition(whole=()),
)
total = md.primitive(
    "total",
    shape=lambda x, *, over: x.dims.without([over]),
    emitters={"jax": lambda x, *, over: x.sum(0)},
    gradient=lambda g, y, x, *, over: g.broadcast(x.dims),
    partition=lambda x, *, over: md.Partition(whole=(), sums=over),
)
divided = md.primitive(
    "divided",
    shape=lambda x, y: [md.spec(x.dims, x.dtype), md.spec(x.dims, "int32")],
    emitters={
        "jax": lambda x, y: (jnp.floor(x / y), jnp.sign(x).astype(np.int32)),
        "numpy": lambda x, y: (np.floor(x / y), np.sign(x).astype(np.int32)),
    },
    gradient=lambda g, outputs, x, y: (g[0], None),
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_primitives_have_parameters_and_gradients(backend):
    def program(x):
        return md.sum(md.square(total(scaled(x, by=3.0), over="a")))

    x = random([a, b])
    expected = 18 * x.data.sum(0) * np.ones((7, 1))
    for mesh, layout in LAYOUTS:
        found = run(md.grad(program), x, mesh=mesh, layout=layout, backend=backend)
        assert_close(found, expected)


def test_what_is_not_said_to_be_split_is_whole():
    x, y = random([a, b]), random([a, b], 1, 2)
    for backend in BACKENDS:
        quotient, signs = run(divided, x, y, mesh="x:2,y:2", layout="a:x; b:y", backend=backend)
        assert_close(quotient, np.floor(x.data / y.data))
        assert signs.dtype == np.int32
    gradient = md.grad(lambda x: md.sum(divided(x, y)[0]))(x)
    assert_close(gradient, np.ones((7, 4)))


def test_a_rule_can_plan_everything_itself():
    def rule(case):
        op = case.operation
        where = TensorLayout()

        def emit(builder, inputs):
            results = [(op.outputs[0].shape, op.outputs[0].dtype, where)]
            return builder.add("local", inputs, results, op.params)

        return Strategy((where,), (where,), emit)

    reversed_ = md.primitive(
        "reversed", shape=lambda x: x.dims, emitters={"jax": lambda x: x[::-1]}, rule=rule
    )
    x = random([a])
    assert_close(run(reversed_, x, mesh="x:2", layout="a:x"), x.data[::-1])


def test_equal_operations_are_done_once():
    x = random([a, b])
    graph = md.jit(lambda x: scaled(x, by=2.0) + scaled(x, by=2.0) + scaled(x, by=3.0))
    instructions = graph.lower(x).block.instructions
    assert [i.op for i in instructions].count("local") == 2
    assert "scaled(x)" in str(graph.lower(x))
    assert "scaled(x, by=2)" in str(graph.trace(x))


def test_it_runs_at_once_outside_of_a_trace():
    x = md.place(random([b, c]), "x:2,y:2", "b:x; c:y")
    y = scaled(x, by=2.0)
    assert str(y.layout) == "b:x; c:y"
    assert_close(y, 2 * np.asarray(x))


# Mistakes.


def test_wrong_results_are_told_with_the_operations_name():
    wrong = md.primitive("wrong", shape=lambda x: x.dims, emitters={"jax": lambda x: (x[:1], x)})
    short = md.primitive("short", shape=lambda x: x.dims, emitters={"jax": lambda x: "text"})
    narrow = md.primitive(
        "narrow",
        shape=lambda x: x.dims,
        emitters={"jax": lambda x: x.astype("float32")[:, :1]},
        partition=md.Partition(split="a"),
    )
    for backend in BACKENDS:
        for function, expected in (
            (wrong, "wrong: 2 arrays were returned for 1 results; result 1 is f64[1, 4], but its "
             "shard of [a=7, b=4] is f64[7, 4]"),
            (short, "short: result 1 is a str, not an array"),
            (narrow, "narrow: result 1 is f32[4, 1], but its shard of [a=7, b=4] is f64[4, 4]"),
        ):  # fmt: skip
            with pytest.raises(ValueError) as error:
                run(function, random([a, b]), mesh="x:2", layout="a:x", backend=backend)
            lines = str(error.value).splitlines()
            assert lines[0] == expected
            assert lines[1].startswith("  at tests/ops/")


def test_a_missing_emitter_is_told():
    only = md.primitive("only", shape=lambda x: x.dims, emitters={"numpy": lambda x: x})
    assert_close(run(only, random([a])), random([a]).data)
    with pytest.raises(ValueError, match=r"only has no emitter for the backend 'jax', only for"):
        run(only, random([a]), backend="jax")


def test_mistakes_in_a_definition_are_told():
    def define(**given):
        md.primitive("mine", **{"shape": len, "emitters": {"jax": len}, **given})

    told = r"no backend 'jaxx'; known are jax, tf, numpy\. Did you mean"
    with pytest.raises(ValueError, match=told):
        define(emitters={"jaxx": len})
    with pytest.raises(ValueError, match="mine needs an emitter"):
        define(emitters={})
    with pytest.raises(ValueError, match="give `partition` or `rule`, not both"):
        define(partition=md.Partition(), rule=len)
    with pytest.raises(ValueError, match="give `split` or `whole`; the other is the rest"):
        md.Partition(split="a", whole="b")


def test_mistakes_in_a_partition_are_told():
    x = random([a, b])
    for given, expected in (
        ({"split": "q"}, "no operand and no result has the dim `q`"),
        ({"split": "b"}, "`b` is split, but not every result has it; if the results are sums over "
         "it, write sums='b'"),
    ):  # fmt: skip
        text = message(lambda x, given=given: md.local(lambda x: x, x, out=["a"], **given), x)
        assert text.splitlines()[0] == f"local: {expected}"
    new = md.Dimension("new", 2)
    text = message(lambda x: md.local(len, x, out=["a", new], split="new", name="mine"), x)
    assert text.splitlines()[0] == "local: `new` is split, but no operand has it"
    odd = md.primitive(
        "odd", shape=lambda x: x.dims, emitters={"jax": len}, partition=lambda x: "a"
    )
    assert "odd: partition must return an md.Partition, not a str" in message(odd, x)


def test_mistakes_in_a_call_are_told():
    x = random([a, b])
    assert "the parameter `by` is a dict; parameters are hashable, and tensors are positional" in (
        message(lambda x: scaled(x, by={}), x)
    )
    assert "no operand has the dim `q`; give one that is new with its size" in message(
        lambda x: md.local(len, x, out=["a", "q"]), x
    )
    assert "local: give at least one tensor" in message(lambda: md.local(len, out=[a]))
    assert "local: 2 dtypes for 1 results" in message(
        lambda x: md.local(len, x, out=["a"], dtype=("float32", "int32")), x
    )
    nothing = md.primitive("nothing", shape=lambda: [a], emitters={"jax": len})
    assert "without operands, the shape rule must return a md.spec" in message(nothing)


def test_missing_and_wrong_gradients_are_told():
    x = random([a, b])
    plain = md.primitive("plain", shape=lambda x: x.dims, emitters={"jax": lambda x: x})
    text = message(md.grad(lambda x: md.sum(plain(x))), x)
    assert text.startswith(
        "plain has no gradient, but one is needed at tests/ops/control/test_local.py:"
    )
    assert "give it one (gradient=...)" in text
    other = message(md.grad(lambda x: md.sum(md.local(jnp.sin, x, out=x.dims, gradient=None))), x)
    assert other.startswith("sin has no gradient")

    def by(gradient):
        wrong = md.primitive(
            "wrong", shape=lambda x: x.dims, emitters={"jax": lambda x: x}, gradient=gradient
        )
        return message(md.grad(lambda x: md.sum(wrong(x))), x)

    assert by(lambda g, y, x: (g, g)) == (
        "the gradient of wrong returns 2 values for 1 operands; give None for those that have none"
    )
    assert by(lambda g, y, x: md.sum(g, "a")) == (
        "the gradient of wrong by operand 1 is f64[b=4], not f64[a=7, b=4]"
    )
