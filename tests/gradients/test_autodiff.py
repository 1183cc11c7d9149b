"""Gradients of functions, against jax.grad and finite differences; what has none is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.gradients.replay import pull_back
from meshdsl.tracing.graph import Operation, Primitive, TracedTensor
from meshdsl.tracing.trace import bind_one
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b = md.dims(a=4, b=3)


def test_the_gradient_has_the_tree_of_its_argument():
    def loss(params, x):
        return md.sum(md.square(x * params["w"] + params["b"][0]))

    def gradient(params, x):
        return md.value_and_grad(loss)(params, x)

    params = {"w": random([a]), "b": [random([], seed=1)]}
    value, found = run(gradient, params, random([a, b], seed=2))
    assert set(found) == {"w", "b"}
    w, bias, x = params["w"].data, params["b"][0].data, random([a, b], seed=2).data
    inner = x * w[:, None] + bias
    assert_close(value, (inner**2).sum())
    assert_close(found["w"], (2 * inner * x).sum(1))
    assert_close(found["b"][0], (2 * inner).sum())


def test_several_arguments_and_results_beside_the_value():
    def loss(x, y, z):
        return md.sum(x * y * z), {"x": x + 1}

    x, y, z = (random([a], seed=i) for i in range(3))
    (value, aux), (by_z, by_x) = run(md.value_and_grad(loss, (2, 0), has_aux=True), x, y, z)
    assert_close(value, (x.data * y.data * z.data).sum())
    assert_close(aux["x"], x.data + 1)
    assert_close(by_z, x.data * y.data)
    assert_close(by_x, y.data * z.data)
    gradient, aux = run(md.grad(loss, 1, has_aux=True), x, y, z)
    assert_close(gradient, x.data * z.data)
    assert_close(aux["x"], x.data + 1)


def test_leaves_that_are_not_floating_point_have_no_gradient():
    indices = md.named(np.array([0, 2], np.int32), [md.Dimension("i", 2)])
    found = run(
        md.grad(lambda tree: md.sum(md.take(tree["table"], tree["indices"], "a"))),
        {"table": random([a]), "indices": indices},
    )
    assert found["indices"] is None
    assert_close(found["table"], [1, 0, 1, 0])


def test_what_the_value_does_not_depend_on_has_zeros():
    found = run(md.grad(lambda x, y: md.sum(x), (0, 1)), random([a]), random([b, a]))
    assert_close(found[1], np.zeros((3, 4)))
    constant = run(md.grad(lambda x: md.sum(md.ones([a], "float64"))), random([a]))
    assert_close(constant, np.zeros(4))


def test_the_gradient_has_the_order_of_dims_of_its_argument():
    found = run(md.grad(lambda x: md.sum(md.square(x.transpose(["b", "a"])))), random([a, b]))
    assert found.dims == md.Shape([a, b])


def test_a_tensor_used_often_has_the_sum_of_its_gradients():
    assert_agree(
        lambda x: x * x + md.sin(x) * md.sum(x) + x,
        lambda x: x * x + jnp.sin(x) * x.sum() + x,
        random([a]),
        order=2,
    )


def test_third_and_fourth_derivatives():
    def derivative(function, times):
        for _ in range(times):
            function = (lambda f: lambda x: md.grad(f)(x))(function)
        return function

    def reference(times):
        function = lambda x: jnp.tanh(x) ** 2 * jnp.exp(x)  # noqa: E731
        for _ in range(times):
            function = jax.grad(function)
        return function

    for times in (3, 4):
        found = run(
            derivative(lambda x: md.tanh(x) ** 2 * md.exp(x), times), md.named(np.float64(0.3), [])
        )
        assert_close(found, reference(times)(0.3))


def test_gradients_inside_of_bodies():
    """A step of gradient descent in a loop, differentiated by its rate."""

    def ours(rate, x):
        def body(x, _):
            return x - rate * md.grad(lambda x: md.sum(md.cos(x) * x))(x), None

        return md.scan(body, x, None, md.Dimension("steps", 3))[0]

    def theirs(rate, x):
        for _ in range(3):
            x = x - rate * jax.grad(lambda x: (jnp.cos(x) * x).sum())(x)
        return x

    assert_agree(ours, theirs, md.named(np.float64(0.1), []), random([a]), order=2)


def test_captured_tensors_are_constants_of_the_inner_gradient():
    def ours(x, y):
        return md.grad(lambda x: md.sum(md.sin(x * y)))(x)

    assert_agree(
        ours, lambda x, y: jax.grad(lambda x: jnp.sin(x * y).sum())(x), random([a]), random([a])
    )


def test_finite_differences_agree():
    def loss(x):
        h = md.gelu(md.einsum(x, x.rename(a="c"), out=["a", "c"]))
        return md.logsumexp(md.softmax(h, "c") * h, ["a", "c"])

    x, way, step = random([a, b]), random([a, b], seed=1), 1e-6
    value = md.jit(loss, backend="numpy")
    ends = [float(value(md.named(x.data + s * step * way.data, x.dims))) for s in (1, -1)]
    slope = (np.asarray(run(md.grad(loss), x)) * way.data).sum()
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-8)


def test_the_value_must_be_a_floating_point_scalar():
    text = message(md.grad(lambda x: x * 2), random([a]))
    assert (
        "gradient: only a floating-point tensor without dims has a gradient, got f64[a=4]" in text
    )
    assert "reduce it first, as in md.mean(x)" in text
    assert "test_autodiff.py:" in text
    text = message(md.grad(lambda x: md.sum(md.cast(x, "int32"))), random([a]))
    assert "got s32[]" in text


def test_an_operation_without_a_gradient_is_told_with_its_line():
    opaque = Primitive("opaque", lambda inputs, params: [(inputs[0].shape, inputs[0].dtype)])
    text = message(md.grad(lambda x: md.sum(bind_one(opaque, (x,)))), random([a]))
    assert "opaque has no gradient, but one is needed at tests/gradients/test_autodiff.py:" in text
    assert "wrap its input in md.stop_gradient(...) if it is a constant there" in text
    assert "write gradient=... of its Primitive in tests/gradients/test_autodiff.py" in text


def test_an_operation_without_a_gradient_and_without_a_line_is_told_without_one():
    x = TracedTensor(random([a]).dims, np.dtype("float64"))
    opaque = Primitive("opaque", lambda inputs, params: [(x.shape, x.dtype)])
    with pytest.raises(ValueError, match="opaque has no gradient, but one is needed; wrap its"):
        pull_back(Operation(opaque, (x,), (x,)), [x], [True])


@pytest.mark.parametrize(
    ("function", "fix"),
    [
        (lambda x: md.sum(md.cast(x, "int32")), "cast what it is made of, md.cast(x, 'float32')"),
        (lambda x: md.all(x > 0), "cast what it is made of, md.cast(x, 'float32')"),
        (lambda x: md.sum(md.complex(x, x)), "take its real part, as in md.real(x)"),
    ],
)
def test_a_scalar_that_is_no_float_is_not_to_be_reduced(function, fix):
    with pytest.raises(ValueError, match="only a floating-point tensor") as error:
        md.grad(function)(md.ones(md.dims(a=2)))
    assert fix in str(error.value)
    assert "reduce" not in str(error.value)
