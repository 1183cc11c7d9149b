"""Elementwise operations: values and derivatives are JAX's in float64; mistakes are told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b, c = md.dims(a=4, b=3, c=2)

UNARY = {
    "negative": (jnp.negative, -2, 2),
    "exp": (jnp.exp, -2, 2),
    "expm1": (jnp.expm1, -2, 2),
    "log": (jnp.log, 0.1, 3),
    "log1p": (jnp.log1p, -0.5, 3),
    "sqrt": (jnp.sqrt, 0.1, 3),
    "rsqrt": (lambda x: 1 / jnp.sqrt(x), 0.1, 3),
    "square": (jnp.square, -2, 2),
    "sin": (jnp.sin, -4, 4),
    "cos": (jnp.cos, -4, 4),
    "tanh": (jnp.tanh, -2, 2),
    "sigmoid": (jax.nn.sigmoid, -4, 4),
    "erf": (jax.scipy.special.erf, -2, 2),
    "abs": (jnp.abs, -2, 2),
    "sign": (jnp.sign, -2, 2),
    "floor": (jnp.floor, -3, 3),
    "ceil": (jnp.ceil, -3, 3),
    "round": (jnp.round, -3, 3),
    "relu": (jax.nn.relu, -2, 2),
    "gelu": (jax.nn.gelu, -3, 3),
    "silu": (jax.nn.silu, -3, 3),
    "softplus": (jax.nn.softplus, -30, 30),
}
BINARY = {
    "add": (jnp.add, -2, 2),
    "subtract": (jnp.subtract, -2, 2),
    "multiply": (jnp.multiply, -2, 2),
    "divide": (jnp.divide, 0.5, 2),
    "maximum": (jnp.maximum, -2, 2),
    "minimum": (jnp.minimum, -2, 2),
    "power": (jnp.power, 0.2, 2),
    "remainder": (jnp.remainder, 0.5, 2),
}
COMPARISONS = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]


@pytest.mark.parametrize("name", UNARY)
def test_unary_operations_and_two_derivatives(name):
    reference, low, high = UNARY[name]
    assert_agree(getattr(md, name), reference, random([a, b], low, high), order=2)


@pytest.mark.parametrize("name", BINARY)
def test_binary_operations_broadcast_by_name_with_two_derivatives(name):
    reference, low, high = BINARY[name]
    x, y = random([b, a], low, high), random([c, a], low, high, seed=1)

    def expected(x, y):  # the first operand's dims, then those only the second has
        return reference(x[:, :, None], y.T[None])

    assert_agree(getattr(md, name), expected, x, y, order=2)


def test_the_operand_with_most_dims_leads_the_result():
    x, y = random([b]), random([c, a, b])
    assert run(md.add, x, y).dims.names == ("c", "a", "b")
    assert run(md.add, y, x).dims.names == ("c", "a", "b")


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_numbers(name):
    x = md.named(np.array([1.0, 2.0, np.nan, np.inf]), [a])
    y = md.named(np.array([1.0, 3.0, np.nan, 0.0]), [a])
    found = run(getattr(md, name), x, y)
    assert found.dtype == np.bool_
    assert np.array_equal(found, getattr(np, name)(x.data, y.data))


def test_logic_and_its_operators():
    x, y = np.array([True, True, False, False]), np.array([True, False, True, False])
    found = run(lambda x, y: [x & y, x | y, ~x, x == y, x != y], md.named(x, [a]), md.named(y, [a]))
    for mine, expected in zip(found, [x & y, x | y, ~x, x == y, x != y], strict=True):
        assert np.array_equal(mine, expected)


def test_operators_are_the_functions_and_numbers_take_the_tensors_dtype():
    x = random([a], 0.5, 2.0)

    def ours(x):
        return ((2 - x) * 3 + 1 / x - -x / 2) ** 2 % 5 + abs(x - 1)

    assert_agree(ours, ours, x)
    half = md.named(x.data.astype(np.float32), [a])
    assert run(ours, half).dtype == np.float32
    assert run(lambda x: (x * 2 + 1) * True.__int__(), md.named(np.arange(4), [a])).dtype == int


def test_powers_of_zero_have_finite_slopes():
    x, y = md.named(np.array([0.0, 0.0, 2.0, 3.0]), [a]), md.named(np.array([0.0, 2, 0, 1]), [a])
    by_x, by_y = run(md.grad(lambda x, y: md.sum(x**y), (0, 1)), x, y)
    assert_close(by_x, [0, 0, 0, 1])
    assert_close(by_y, [0, 0, np.log(2), 3 * np.log(3)])
    assert_agree(lambda x: x**2, lambda x: x**2, x, order=2)
    assert_agree(lambda x: x**3, lambda x: x**3, md.named(-x.data, [a]), order=2)


def test_ties_of_maximum_and_minimum_share_the_slope():
    x = random([a])
    for choose in (md.maximum, md.minimum):
        gradient = md.grad(functools.partial(_total, choose), (0, 1))
        for found in run(gradient, x, md.named(x.data.copy(), [a])):
            assert_close(found, np.full(4, 0.5))


def _total(function, x, y):
    return md.sum(function(x, y))


def test_where_chooses_and_its_gradient_goes_where_the_value_came_from():
    condition = md.named(np.array([True, False, True]), [b])
    x, y = random([a, b]), random([a], seed=1)

    def expected(condition, x, y):
        return jnp.where(condition, x, y[:, None])

    assert_agree(md.where, expected, condition, x, y, order=2)
    assert_agree(
        lambda k, x: md.where(k, 1, x) + md.where(k, x, 0.5),
        lambda k, x: jnp.where(k, 1, x) + jnp.where(k, x, 0.5),
        condition,
        x,
    )


def test_the_branch_not_taken_does_not_spoil_the_gradient():
    x = md.named(np.array([0.0, 1.0, 4.0, 9.0]), [a])

    def safe(x):
        return md.where(x > 0, md.sqrt(md.where(x > 0, x, 1.0)), 0.0)

    found = run(md.grad(lambda x: md.sum(safe(x))), x)
    assert_close(found, [0, 0.5, 0.25, 1 / 6])


def test_isfinite_and_clip():
    x = md.named(np.array([-np.inf, np.nan, 0.3, np.inf]), [a])
    assert np.array_equal(run(md.isfinite, x), [False, False, True, False])
    assert_agree(
        lambda x: md.clip(x, -0.5, 0.25), lambda x: jnp.clip(x, -0.5, 0.25), random([a, b]), order=2
    )


@pytest.mark.parametrize("before", ["bool", "int32", "uint8", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("after", ["bool", "int32", "uint8", "float32", "float64", "bfloat16"])
def test_casts(before, after):
    data = np.array([0, 1, 3, 2]).astype(md.spec([a], before).dtype)
    found = run(lambda x: md.cast(x, after), md.named(data, [a]))
    assert found.dtype == md.spec([a], after).dtype
    assert np.array_equal(found, data.astype(found.dtype))


def test_the_gradient_of_a_cast_is_cast_back():
    found = run(md.grad(lambda x: md.sum(md.square(md.cast(x, "float32")))), random([a]))
    assert found.dtype == np.float64


def test_stop_gradient_is_a_constant_to_grad():
    assert_agree(
        lambda x: x * md.stop_gradient(x), lambda x: x * jax.lax.stop_gradient(x), random([a])
    )


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "erf", "rsqrt", "sqrt"])
def test_half_precision_agrees_with_jax(name):
    x = md.named(random([a], 0.1, 2.0).data.astype(md.spec([a], "bfloat16").dtype), [a])
    found, expected = run(getattr(md, name), x), run(getattr(md, name), x, backend="jax")
    assert found.dtype == expected.dtype == x.dtype
    assert_close(np.asarray(found, np.float32), np.asarray(expected, np.float32), 1e-2)


# Mistakes.


def test_one_name_with_two_sizes_shows_both_places():
    x, y = random([a, b]), md.named(np.zeros(8), ["a"])

    def model(x, y):
        left = x * 2
        right = y * 3
        return left + right

    text = message(model, x, y)
    line = model.__code__.co_firstlineno
    assert text.startswith("add: dim `a` has size 4 in f64[a=4, b=3] (made at ")
    assert f"test_elementwise.py:{line + 1}) but 8 in f64[a=8]" in text
    assert f"test_elementwise.py:{line + 2})" in text
    assert text.endswith(f"test_elementwise.py:{line + 3}  return left + right")


def test_two_clashes_of_one_operation_are_told_together():
    x, y = random([a, b]), md.named(np.zeros((8, 2)), ["a", "b"])
    text = message(lambda x, y: x + y, x, y)
    assert "dim `a` has size 4" in text
    assert "dim `b` has size 3" in text


def test_dtypes_do_not_mix():
    text = message(lambda x, y: x * y, random([a]), md.named(np.zeros(4, np.float32), [a]))
    assert "multiply: dtypes differ: f64, f32; cast one, as in md.cast(x, 'float32')" in text
    assert "operand 2: f32[a=4]" in text
    text = message(lambda x: md.where(x > 0, x, md.cast(x, "float32")), random([a]))
    assert "where: dtypes differ: f64, f32; cast one, as in md.cast(x, 'float32')" in text


def test_operations_tell_what_they_need():
    whole, mask = md.named(np.arange(4), [a]), md.named(np.ones(4, bool), [a])
    assert "exp: needs floating-point tensors, got s64" in message(md.exp, whole)
    assert "logical_and: needs bool tensors, got s64" in message(lambda x: x & x, whole)
    assert "less: needs floating-point or integer tensors, got bool" in message(
        lambda x: x < x, mask
    )
    assert "where: the condition must be bool, got s64" in message(
        lambda x: md.where(x, x, x), whole
    )
    assert "unknown dtype 'float31'; choose one of bool, int8" in message(
        lambda x: md.cast(x, "float31"), whole
    )


def test_numbers_that_do_not_fit_the_tensor_are_told():
    whole, mask = md.named(np.arange(4, dtype=np.int8), [a]), md.named(np.ones(4, bool), [a])
    assert "add: the number 0.5 would be rounded to the tensor's dtype int8; cast the tensor" in (
        message(lambda x: x + 0.5, whole)
    )
    assert "multiply: int8 holds whole numbers from -128 to 127, not 300" in message(
        lambda x: x * 300, whole
    )
    assert "add: the number 1 meets a bool tensor" in message(lambda x: x + 1, mask)
    assert "add: the bool True meets a tensor of numbers; write 1 instead" in message(
        lambda x: x + True, random([a])
    )


def test_other_operands_are_told():
    for operand in (np.ones(4), [1], "x"):
        text = message(functools.partial(md.multiply, operand), random([a]))
        assert f"{type(operand).__name__} is not an operand; use a tensor, a Python number" in text


def test_a_tensor_has_no_truth_value():
    def model(x):
        return x if x > 0 else -x

    text = message(model, random([]))
    assert "the value of bool[] is not known while tracing" in text
    assert "write md.where(...), `&`, `|` or `~`" in text


def test_operations_need_a_traced_function():
    with pytest.raises(ValueError, match=r"run inside a traced function: wrap .* md.jit") as error:
        md.add(random([a]), 1.0)
    assert "operand 1: NamedArray(f64[a=4])" in str(error.value)


def test_named_arrays_become_literals_of_the_program():
    x, y = random([a, b]), random([a], seed=1)
    found = run(lambda x: [md.exp(y), x + y, md.where(x > 0, y, x), md.cast(y, "float64")], x)
    assert_close(found[0], np.exp(y.data))
    assert_close(found[1], x.data + y.data[:, None])
    assert_close(found[2], np.where(x.data > 0, y.data[:, None], x.data))
    assert_close(found[3], y.data)
