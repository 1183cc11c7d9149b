"""Primitives of JAX, one by one: a converted function computes what JAX computes, on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6)).astype(np.float32)
Y = RNG.normal(size=(6, 6)).astype(np.float32)
N = RNG.integers(0, 6, (4,)).astype(np.int32)
IMAGE = RNG.normal(size=(2, 6, 6, 4)).astype(np.float32)
FILTERS = RNG.normal(size=(3, 3, 4, 6)).astype(np.float32)
AWAY = jax.lax.RoundingMethod.AWAY_FROM_ZERO
KEY = np.array([1, 2], np.uint32)


def scan(x, y):
    def body(carry, row):
        carry = jnp.tanh(carry @ y + row)
        return carry, carry.sum()

    return jax.lax.scan(body, jnp.zeros(6), x)


def scan_with_unused_carry(x, y):
    return jax.lax.fori_loop(0, 3, lambda i, v: v * y[i] + x[i], jnp.zeros(6))


def loop(x, y):
    return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.sin(s[1]) @ y), (0, x))


def branches(x, y):
    return jax.lax.switch(x[0, 0].astype(int) % 3, [jnp.sin, jnp.cos, jnp.exp], x @ y)


def custom(x, y):
    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * 2,))
    return f(jax.nn.relu(x)) + jax.nn.silu(x)


def log_sums(x, y):
    far = jnp.where(x < 0.5, -jnp.inf, x)
    return [jax.lax.cumlogsumexp(each, 1, reverse=r) for each in (200 * x, far) for r in (0, 1)]


def attend(x, y):
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x @ x.T, -1e9)
    return jax.nn.softmax(scores) @ x


def pool_slopes(x, w):
    """The gradient of pooling, as a step has it that differentiates inside."""

    def lowest(x):
        window, strides = (1, 3, 3, 1), (1, 1, 2, 1)
        return jax.lax.reduce_window(x, jnp.inf, jax.lax.min, window, strides, "SAME")

    return jax.grad(lambda x: jnp.sum(jnp.sin(pool(x, w)[0])) + jnp.sum(jnp.cos(lowest(x))))(x)


def draw(key, x):
    first, second = jax.random.split(key)
    noise = jax.random.normal(first, x.shape) + jax.random.uniform(jax.random.fold_in(key, 3), (6,))
    return jnp.where(jax.random.bernoulli(second, 0.5, x.shape), noise, x)


def draw_each(key, x):
    """Draws with a key for each row, as dropout under `jax.vmap` does."""

    def row(key, x, number):
        first, second = jax.random.split(key)
        inner = jax.vmap(lambda n: jax.random.fold_in(jax.random.key(n), number))(jnp.arange(2))
        noise = jax.random.normal(jax.random.fold_in(first, 3), x.shape)
        noise += jax.random.uniform(jax.random.fold_in(second, number), ())
        return jnp.where(jax.random.bernoulli(second, 0.5, x.shape), noise, x), (
            jax.vmap(lambda key: jax.random.uniform(key, (3, 2)))(inner),
            jax.random.bits(first, (3,), "uint8"),
        )

    return jax.vmap(row)(jax.random.split(key, len(x)), x, jnp.arange(len(x)))


def over_rows(x, y):
    def row(x, y):
        mean, total = jax.lax.pmean((x, y), "row"), jax.lax.psum(1, "row")
        return x - jax.lax.pmax(x, "row") + mean[0] * jax.lax.pmin(y, "row"), mean[1] * total

    return jax.vmap(row, axis_name="row", in_axes=(0, None))(x, y[0])


def changed_ramp(x, y):
    ramp = jnp.arange(6)
    return y[jax.lax.select(ramp < 3, jnp.full_like(ramp, 5), ramp)]


def conv(x, w, strides=(1, 1), padding="SAME", **kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **kwargs)


def pool(x, w):
    window, strides = (1, 2, 2, 1), (1, 2, 2, 1)
    most = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID")
    total = jax.lax.reduce_window(x, 0.0, jax.lax.add, window, strides, "SAME")
    return most, total


CASES = {
    "product of one array with itself": (lambda x, y: x @ x.T, X, Y),
    "square and its transpose": (lambda x, y: y + y.T @ y, X, Y),
    "attention of rows": (attend, X, Y),
    "sum of unequal ranks": (lambda x, y: x + y[0] + x.mean(0, keepdims=True), X, Y),
    "merge and split": (lambda x, y: (x.reshape(-1) * 2).reshape(2, 2, 3, 2), X, Y),
    "reshape across": (lambda x, y: x.reshape(6, 4) @ x.reshape(8, 3).reshape(4, 6), X, Y),
    "merged product": (
        lambda x, y: jnp.einsum("ij,kj->ik", x.reshape(2, 2, 6).reshape(4, 6), y),
        X,
        Y,
    ),
    "outer ramp": (lambda x, y: jnp.arange(4)[:, None] >= jnp.arange(4)[None], X, Y),
    "slices and joins": (lambda x, y: jnp.concatenate([x[:, ::2], x[:, 1:4], y[:4]], 1), X, Y),
    "pad and flip": (lambda x, y: jnp.flip(jnp.pad(x, ((1, 2), (0, 0))), 0), X, Y),
    "stack and roll": (lambda x, y: jnp.stack([x, jnp.roll(x, 1, 1)], 1), X, Y),
    "dynamic slice": (lambda x, n: jax.lax.dynamic_slice(x, (n[0] % 3, n[1]), (2, 4)), X, N),
    "dynamic update": (lambda x, n: jax.lax.dynamic_update_slice(x, x[:2, :3], (n[0], n[1])), X, N),
    "look-up": (lambda y, n: y[n] * jnp.take(y, n, axis=1).T, Y, N),
    "look-up outside": (lambda y, n: jnp.take(y, n + 3, axis=0), Y, N),
    "look-up clipped": (lambda y, n: jnp.take(y, n + 3, axis=0, mode="clip"), Y, N),
    "one of each row": (lambda x, n: x[jnp.arange(4), n], X, N),
    "pairs": (lambda y, n: y[n, n[::-1]], Y, N),
    "along": (lambda x, n: jnp.take_along_axis(x, n[:, None], 1), X, N),
    "one-hot": (lambda x, n: jax.nn.one_hot(n, 6) * x, X, N),
    "write": (lambda x, n: x.at[:, 0].set(1.0).at[1:3].add(2.0).at[n[0] % 4].mul(0 * n[0]), X, N),
    "add at": (lambda y, n: y.at[n].add(y[:4]).at[:, n].max(0.5), Y, N),
    "add at pairs": (lambda x, n: x.at[jnp.arange(4), n].add(1.0), X, N),
    "blocks that may be outside": (
        lambda x, n: (
            [x.at[4 + 0 * n[0], 2:5].set(1.0), x.at[4 + 0 * n[0]].multiply(2.0)],
            [x.at[i + 0 * n[0], 2:5].get(mode="fill", fill_value=3.0) for i in (2, 4)],
            [x.at[i, 2:5].add(1.0, mode=mode) for i, mode in ((3, "drop"), (5, "drop"))],
            [x.at[i + 0 * n[0], 2:5].set(1.0, mode="clip") for i in (3, 4)],
        ),
        X,
        N,
    ),
    "look-up by a ramp that is changed": (changed_ramp, X, Y),
    "cumulative of constants": (
        lambda x, y: (
            x[0, :4] * (jnp.cumsum(jnp.ones(4, jnp.int32)) / 4),
            jax.lax.dynamic_slice(x[0], (jnp.cumsum(jnp.ones(3, jnp.int32))[2],), (2,)),
        ),
        X,
        Y,
    ),
    "order": (lambda x, y: (jnp.sort(x), jnp.argsort(x, 0), jax.lax.top_k(x, 2)[0]), X, Y),
    "extremes": (lambda x, y: (x.argmax(1), jnp.cumsum(x, 0), jax.lax.cummax(x, 1, True)), X, Y),
    "logcumsumexp": (log_sums, X, Y),
    "fewer bits": (
        lambda x, y: [jax.lax.reduce_precision(x * s, 5, 10) for s in (1, 1e-5, 1e5)],
        X,
        Y,
    ),
    "half away from zero": (
        lambda x, y: jax.lax.round(jnp.float32(0.49999997) + 0 * x, AWAY),
        X,
        Y,
    ),
    "least integers": (
        lambda n, m: (jax.lax.div(n, m), jax.lax.rem(n, m)),
        np.array([-(2**31), -(2**31), -7, 7], np.int32),
        np.array([3, -3, -2, 2], np.int32),
    ),
    "powers of integers": (lambda x, n: jnp.broadcast_to(n[:, None], (4, 3)).prod(1), X, N),
    "windows of naturals": (
        lambda n, x: jax.lax.reduce_window(
            n, np.uint32(2**32 - 1), jax.lax.min, (2,), (1,), "SAME"
        ),
        N.astype(np.uint32),
        X,
    ),
    "scan in parallel": (lambda x, y: jax.lax.associative_scan(jnp.multiply, x), X, Y),
    "scan": (scan, X, Y),
    "counted loop": (scan_with_unused_carry, X, Y),
    "while": (loop, X, Y),
    "branches": (branches, X, Y),
    "custom rules": (custom, X, Y),
    "checkpoint": (lambda x, y: jax.checkpoint(lambda x: jnp.sin(x @ y))(x), X, Y),
    "vmap": (lambda x, y: jax.vmap(lambda r: y @ r)(x), X, Y),
    "slopes of pooling": (pool_slopes, IMAGE, FILTERS),
    "random": (draw, KEY, X),
    "random numbers of several keys": (draw_each, KEY, X),
    "collectives of vmap": (over_rows, X, Y),
    "extremes of truths": (lambda x, y: (jnp.max(x > 0, 0), jnp.min(y > -1, 1)), X, Y),
    "integers": (lambda x, n: (n // 2, n % 4, -n // 3, (n << 2) ^ n), X, N),
    "constant table": (lambda x, y: x * np.arange(24.0, dtype=np.float32).reshape(4, 6), X, Y),
    "convolution": (conv, IMAGE, FILTERS),
    "strided convolution": (
        functools.partial(conv, strides=(2, 2), padding="VALID"),
        IMAGE,
        FILTERS,
    ),
    "dilated convolution": (functools.partial(conv, rhs_dilation=(2, 2)), IMAGE, FILTERS),
    "upsampling convolution": (
        functools.partial(conv, padding=((1, 2), (0, 3)), lhs_dilation=(2, 2)),
        IMAGE,
        FILTERS,
    ),
    "pooling": (pool, IMAGE, FILTERS),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_converted_function_computes_what_jax_computes(case):
    function, *arrays = CASES[case]
    program = md.from_jax(function)
    arguments = program.named(*arrays)
    names = [name for name in arguments[-1].dims.names[:2] if name != "random_key"]
    layout = "; ".join(f"{name}:{axis}" for name, axis in zip(names, "ab", strict=False))
    results = md.jit(program, mesh="a:2,b:2", layout=layout, backend="numpy")(*arguments)
    expected = jax.tree.leaves(function(*map(jnp.asarray, arrays)))
    results = jax.tree.leaves(results, is_leaf=lambda x: isinstance(x, md.NamedArray))
    for mine, theirs in zip(results, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.dims.sizes == theirs.shape
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_the_gradient_of_sums_of_exponentials_is_that_of_jax():
    def loss(x):
        return jnp.sum(jax.lax.cumlogsumexp(200 * x, 1) * Y[:4])

    program = md.from_jax(loss)
    found = md.jit(md.grad(program), mesh="a:2", layout="x_1:a", backend="numpy")(*program.named(X))
    np.testing.assert_allclose(np.asarray(found), jax.grad(loss)(X), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.relu,
        jax.nn.relu6,
        jax.vmap(jax.nn.relu),
        jax.checkpoint(jax.nn.relu),
        lambda x: jnp.maximum(x, 0),  # the largest share the gradient, as in JAX
        jnp.abs,
        lambda x: jax.lax.clamp(np.float32(0), x, np.float32(6)),
        lambda x: jax.lax.clamp(x, x * 0, x + 1),
        lambda x: jax.nn.log_sigmoid(x) + jnp.logaddexp(x, 0.0),  # smooth, by `abs`
        lambda x: jax.lax.rem(x, np.float32(3)) + x % 5,
        lambda x: jax.lax.rem(np.float32(3), 2 * x + 1),
    ],
)
def test_slopes_at_the_corners_are_those_of_jax(function):
    """Where a residual branch begins with weights of zero, all of it is at the corner of `relu`."""
    x = np.array([[0.0, -1.0, 6.0, 2.0], [0.0, 7.0, 5.0, -0.0]], np.float32)

    def loss(x):
        return jnp.sum(function(x) * np.arange(1.0, 9, dtype=np.float32).reshape(2, 4))

    program = md.from_jax(loss)
    found = md.jit(md.grad(program), mesh="a:2", layout="x_1:a", backend="numpy")(*program.named(x))
    np.testing.assert_allclose(np.asarray(found), jax.grad(loss)(x), rtol=1e-6, atol=0)


def test_magnitudes_have_no_sign():
    """Of -0 as of 0, and of infinities."""
    x = np.array([0.0, -0.0, -np.inf, np.inf], np.float32)
    program = md.from_jax(lambda x: (jnp.abs(x), jnp.sign(1 / jnp.abs(x))))
    sizes, signs = program(*program.named(x))
    np.testing.assert_array_equal(np.asarray(sizes), [0, 0, np.inf, np.inf])
    np.testing.assert_array_equal(np.asarray(signs), [1, 1, 0, 0])


def test_only_relu_itself_is_taken_for_relu():
    @jax.custom_jvp
    def other(x):
        jnp.maximum(x, 0.0)
        return x

    @jax.custom_jvp
    def both(x):
        jnp.maximum(x, 0.0)
        return jnp.minimum(x, 6.0)

    @jax.custom_jvp
    def two(x):
        return jnp.maximum(x, 0.0), x

    @jax.custom_jvp
    def behind(x):
        return jnp.minimum(jnp.maximum(x, 0.0) + x, 6.0)

    x = np.array([-1.0, 0.0, 3.0, 7.0], np.float32)
    for function in (other, both, two, behind):
        function.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
        program = md.from_jax(function)
        found = md.jit(program, backend="numpy")(*program.named(x))
        for mine, theirs in zip(
            jax.tree.leaves(md.unnamed(found)), jax.tree.leaves(function(x)), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (jnp.bitwise_and.reduce, "`reduce_and`: of the bits of integers"),
        (
            lambda n: jax.lax.reduce_window(n, np.int32(0), jax.lax.add, (2,), (1,), "SAME"),
            "`reduce_window_sum`: of integers",
        ),
    ],
)
def test_what_has_no_translation_for_integers_is_refused(function, reason):
    program = md.from_jax(function)
    with pytest.raises(ValueError, match=f"from_jax: {reason} at .*test_primitives.py"):
        md.jit(program, backend="numpy")(*program.named(N))


@pytest.mark.long
def test_remainders_of_zero_are_those_of_jax():
    x = np.zeros(5, np.float32)
    y = np.array([0.0, np.nan, np.inf, -2.0, 2.0], np.float32)
    for function in (jax.lax.rem, jnp.remainder):
        program = md.from_jax(function)
        found = md.jit(program, backend="numpy")(*program.named(x, y))
        np.testing.assert_array_equal(np.asarray(found), function(x, y))
