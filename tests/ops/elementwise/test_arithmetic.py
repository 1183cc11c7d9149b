"""Elementwise operations: values and derivatives are JAX's in float64; mistakes are told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.tensors.dtypes import as_dtype
from tests.ops.agreement import assert_agree, assert_close, message, random, run

a, b, c = md.dims(a=4, b=3, c=2)

UNARY = {
    "negative": (jnp.negative, -2, 2),
    "exp": (jnp.exp, -2, 2),
    "exp2": (jnp.exp2, -2, 2),
    "expm1": (jnp.expm1, -2, 2),
    "log": (jnp.log, 0.1, 3),
    "log2": (jnp.log2, 0.1, 3),
    "log10": (jnp.log10, 0.1, 3),
    "log1p": (jnp.log1p, -0.5, 3),
    "sqrt": (jnp.sqrt, 0.1, 3),
    "rsqrt": (lambda x: 1 / jnp.sqrt(x), 0.1, 3),
    "cbrt": (jnp.cbrt, 0.1, 3),
    "reciprocal": (jnp.reciprocal, 0.1, 3),
    "square": (jnp.square, -2, 2),
    "sin": (jnp.sin, -4, 4),
    "cos": (jnp.cos, -4, 4),
    "tan": (jnp.tan, -1, 1),
    "asin": (jnp.asin, -0.9, 0.9),
    "acos": (jnp.acos, -0.9, 0.9),
    "atan": (jnp.atan, -3, 3),
    "sinh": (jnp.sinh, -2, 2),
    "cosh": (jnp.cosh, -2, 2),
    "tanh": (jnp.tanh, -2, 2),
    "asinh": (jnp.asinh, -3, 3),
    "acosh": (jnp.acosh, 1.1, 3),
    "atanh": (jnp.atanh, -0.9, 0.9),
    "sigmoid": (jax.nn.sigmoid, -4, 4),
    "abs": (jnp.abs, -2, 2),
    "sign": (jnp.sign, -2, 2),
    "floor": (jnp.floor, -3, 3),
    "ceil": (jnp.ceil, -3, 3),
    "trunc": (jnp.trunc, -3, 3),
    "round": (jnp.round, -3, 3),
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
    "atan2": (jnp.atan2, -2, 2),
    "hypot": (jnp.hypot, -2, 2),
    "logaddexp": (jnp.logaddexp, -30, 30),
}
COMPARISONS = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]


@pytest.mark.long
@pytest.mark.parametrize("name", UNARY)
def test_unary_operations_and_two_derivatives(name):
    reference, low, high = UNARY[name]
    steps = ("sign", "floor", "ceil", "trunc", "round")  # the results depend on nothing else
    function = getattr(md, name)
    if name in steps:
        assert_agree(function, reference, random([a, b], low, high), order=0)
        text = message(md.grad(lambda x: md.sum(function(x))), random([a, b], low, high))
        assert f"x (f64[a={a.size}, b={b.size}]) reaches the value only through {name} at " in text
        function, reference = (
            (lambda x: x * getattr(md, name)(x)),
            (lambda x: x * UNARY[name][0](x)),
        )
    assert_agree(function, reference, random([a, b], low, high), order=2)


@pytest.mark.long
@pytest.mark.parametrize("name", BINARY)
def test_binary_operations_broadcast_by_name_with_two_derivatives(name):
    reference, low, high = BINARY[name]
    x, y = random([b, a], low, high), random([c, a], low, high, seed=1)

    def expected(x, y):  # the first operand's dims, then those only the second has
        return reference(x[:, :, None], y.T[None])

    assert_agree(lambda x, y: md.outer(getattr(md, name), x, y), expected, x, y, order=2)


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
    assert_close(run(lambda x: 7 // x, x), 7 // x.data)
    for mine, expected in zip(
        run(lambda x: divmod(x * 9, 0.5), x), divmod(x.data * 9, 0.5), strict=True
    ):
        assert_close(mine, expected)
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


def test_logaddexp_is_smooth_where_its_operands_are_equal():
    x, y = (md.named(np.array([0.0, 3.0, -1.0, 2.0]), [a]) for _ in range(2))
    assert_agree(md.logaddexp, jnp.logaddexp, x, y, order=2)
    for infinite in (np.inf, -np.inf):
        x = md.named(np.full(4, infinite), [a])
        slope = run(md.grad(lambda x: md.sum(md.logaddexp(x, infinite))), x)  # noqa: B023
        assert_close(slope, np.full(4, 0.5))


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


def test_tests_of_single_numbers():
    x = md.named(np.array([-np.inf, np.nan, 0.3, np.inf]), [a])
    for name in ("isfinite", "isnan", "isinf"):
        assert np.array_equal(run(getattr(md, name), x), getattr(np, name)(x.data))
    assert_close(run(md.nan_to_num, x), np.nan_to_num(x.data))
    assert_close(run(lambda x: md.nan_to_num(x, 1, 2, 3), x), np.nan_to_num(x.data, True, 1, 2, 3))


def test_clip_to_numbers_tensors_or_nothing():
    assert_agree(
        lambda x: md.clip(x, -0.5, 0.25), lambda x: jnp.clip(x, -0.5, 0.25), random([a, b]), order=2
    )
    x, low = random([a, b]), random([b], seed=1)
    found = run(lambda x, low: [md.clip(x, low), md.clip(x, high=low), md.clip(x)], x, low)
    for mine, expected in zip(found, [np.maximum, np.minimum, lambda x, y: x], strict=True):
        assert_close(mine, expected(x.data, low.data))


def test_division_of_whole_numbers_by_zero_gives_zero():
    x, y = md.named(np.array([7, -7, 0, 5]), [a]), md.named(np.array([0, 2, 0]), [b])
    for backend in ("numpy", "jax"):
        quotient, rest = run(lambda x, y: md.outer(divmod, x, y), x, y, backend=backend)
        assert np.array_equal(quotient, [[0, 3, 0], [0, -4, 0], [0, 0, 0], [0, 2, 0]])
        assert np.array_equal(rest, [[0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0]])


def test_powers_of_whole_numbers_wrap_and_negative_ones_give_zero():
    x, y = md.named(np.array([3, -7, 10, 0]), [a]), md.named(np.array([0, 100, -2]), [b])
    expected = [[v ** max(n, 0) if n >= 0 else 0 for n in (0, 100, -2)] for v in (3, -7, 10, 0)]
    wrapped = np.array([[(v + 2**63) % 2**64 - 2**63 for v in row] for row in expected])
    for backend in ("numpy", "jax"):
        assert np.array_equal(
            run(lambda x, y: md.outer(md.power, x, y), x, y, backend=backend), wrapped
        )
        found = run(lambda x: [x**3, x**-1], x, backend=backend)
        assert np.array_equal(found[0], x.data**3)
        assert np.array_equal(found[1], np.zeros(4))


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


@pytest.mark.parametrize("name", ["exp", "exp2", "tanh", "sigmoid", "rsqrt", "sqrt"])
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
    assert f"test_arithmetic.py:{line + 1}) but 8 in f64[a=8]" in text
    assert f"test_arithmetic.py:{line + 2})" in text
    assert text.endswith(f"test_arithmetic.py:{line + 3}  return left + right")


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
    assert "exp: needs floating-point or complex tensors, got s64" in message(md.exp, whole)
    assert "logical_and: needs bool tensors, got s64" in message(md.logical_and, whole, whole)
    assert "bit_and: needs integer or bool tensors, got f64" in message(
        lambda x: x & x, random([a])
    )
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


def test_complex_numbers_are_not_cast_or_mixed_in_silence():
    z = md.named(np.ones(4, np.complex64), [a])
    assert "cast: c64 to f32 would drop the imaginary part; take a part of it, as in md.real" in (
        message(lambda z: md.cast(z, "float32"), z)
    )
    assert "add: the complex number 1j meets float64; cast the tensor first, as in md.cast(" in (
        message(lambda x: x + 1j, random([a]))
    )
    assert "maximum: needs floating-point or integer tensors, got c64" in message(
        lambda z: md.maximum(z, z), z
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
    assert "write md.where(...), md.cond(...), `&`, `|` or `~`" in text


def test_named_arrays_become_literals_of_the_program():
    x, y = random([a, b]), random([a], seed=1)
    found = run(lambda x: [md.exp(y), x + y, md.where(x > 0, y, x), md.cast(y, "float64")], x)
    assert_close(found[0], np.exp(y.data))
    assert_close(found[1], x.data + y.data[:, None])
    assert_close(found[2], np.where(x.data > 0, y.data[:, None], x.data))
    assert_close(found[3], y.data)


@pytest.mark.parametrize("backend", ["numpy", "jax", "tf"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_power_of_two_is_exact(backend, dtype):
    exponents = np.arange(-14, 15)
    powers = 2.0**exponents
    numbers = np.concatenate([powers, -powers, 1.25 * powers, 1.9921875 * powers])
    x = md.named(np.append(numbers, [0, np.inf]).astype(as_dtype(dtype)), ["n"])
    found = md.jit(md.power_of_two, backend=backend)(x)
    assert found.dtype == x.dtype
    expected = [*powers, *powers, *powers, *powers, 0, np.inf]
    assert np.asarray(found).astype(np.float64).tolist() == expected
