"""Rotary positions, against multiplication by complex numbers; biases, against plain Python."""

import math

import numpy as np
import pytest

import meshdsl as md
from meshdsl import nn

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 12, 4, 8))
DIMS = ["batch", "length", "heads", "kv"]


def turned(x, base=10000.0):
    """x is [batch, length, heads, kv]; feature i + n/2 is the imaginary part of feature i."""
    half = x.shape[-1] // 2
    points = x[..., :half] + 1j * x[..., half:]
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    points = points * np.exp(1j * angle)[:, None]
    return np.concatenate([points.real, points.imag], -1)


def test_pairs_are_turned_as_complex_numbers():
    found = md.jit(lambda x: nn.rotary(x))(md.named(X, DIMS))
    assert found.dims.names == tuple(DIMS)
    np.testing.assert_allclose(found, turned(X), atol=2e-6)


def test_dims_and_base_may_be_named():
    x = md.named(X, ["batch", "memory_length", "heads", "features"])
    found = md.jit(lambda x: nn.rotary(x, "memory_length", over="features", base=500.0))(x)
    np.testing.assert_allclose(found, turned(X, base=500.0), atol=2e-6)


def test_the_product_of_query_and_key_depends_on_their_distance_only():
    one = np.broadcast_to(RNG.normal(size=8), (1, 12, 1, 8))
    q, k = (np.asarray(md.jit(lambda x: nn.rotary(x))(md.named(one * s, DIMS))) for s in (1, -2))
    scores = np.einsum("blhk,bmhk->lm", q, k)
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=2e-5)


def rates(scaling, reach=None, base=100.0):
    """Returns the rate of each pair of features, by the table of the first position after 0."""
    length, kv = md.dims(length=2, kv=8)
    found = md.jit(lambda: nn.rotation(length, kv, base, scaling=scaling, reach=reach))()
    cos, sin = np.asarray(found.cos)[1, :4], np.asarray(found.sin)[1, 4:]
    np.testing.assert_allclose(np.hypot(cos, sin), scaling.size, rtol=1e-6)
    return np.arctan2(sin, cos)


def test_a_larger_base_turns_the_slowest_pair_no_further_than_the_first_length_did():
    scaling = nn.RotaryScaling("dynamic", 2.0, original=10)
    usual = 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(rates(scaling, reach=10), usual, rtol=1e-6)
    far = rates(scaling, reach=30)  # 2 * 30 / 10 - 1 = 5 times as far
    np.testing.assert_allclose(far, usual * 5 ** (-np.arange(4) / 3), rtol=1e-6)


def test_divisors_depend_on_whether_a_text_may_be_longer_than_the_first_ones():
    scaling = nn.RotaryScaling("longrope", 4.0, original=16, short=(1, 2, 3, 4), long=(5, 6, 7, 8))
    usual = 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(rates(scaling, reach=16), usual / [1, 2, 3, 4], rtol=1e-6)
    np.testing.assert_allclose(rates(scaling, reach=17), usual / [5, 6, 7, 8], rtol=1e-6)
    np.testing.assert_allclose(scaling.size, np.sqrt(1 + np.log(4) / np.log(16)))


def test_yarn_keeps_fast_pairs_and_slows_others_down():
    scaling = nn.RotaryScaling("yarn", 4.0, low=0.5, high=2.0, original=32)
    usual = 100.0 ** (-np.arange(4) / 4)
    # Pairs 0.81 and 2.01 turn twice and half a time in 32 positions: a ramp from pair 0 to 3.
    slower = usual * [1, 2 / 3 + 1 / 12, 1 / 3 + 1 / 6, 1 / 4]
    np.testing.assert_allclose(rates(scaling), slower, rtol=1e-6)
    assert scaling.size == 0.1 * np.log(4) + 1


def test_divisors_for_another_number_of_features_are_told():
    scaling = nn.RotaryScaling("longrope", 4.0, short=(1.0,), long=(1.0,))
    with pytest.raises(ValueError, match="longrope: 1 divisors for 4 pairs of features `kv`"):
        rates(scaling)


@pytest.mark.filterwarnings("ignore:.*takes no axis anywhere")
@pytest.mark.parametrize("layout", ["length:model; heads:data", "heads:model; length:model?"])
def test_tables_made_once_serve_split_tensors(layout):
    def both(x):
        rotation = nn.rotation(x.shape.get("length"), x.shape.get("kv"))
        return rotation(x), rotation(2 * x)

    where = {"mesh": "data:2,model:4", "layout": layout, "backend": "numpy"}
    one, two = md.jit(both, **where)(md.named(X, DIMS))
    np.testing.assert_allclose(one, turned(X), atol=2e-6)
    np.testing.assert_allclose(two, 2 * turned(X), atol=4e-6)


def test_half_precision_is_turned_in_float32():
    def both(x):
        half = md.cast(x, "bfloat16")
        return nn.rotary(half), md.cast(half, "float64")

    found, rounded = md.jit(both)(md.named(X, DIMS))
    assert found.dtype.name == "bfloat16"
    np.testing.assert_allclose(
        np.asarray(found).astype("float64"), turned(np.asarray(rounded)), rtol=2**-8, atol=2e-6
    )


def test_the_gradient_turns_back():
    def loss(x, g):
        return md.sum(nn.rotary(x) * g)

    g = RNG.normal(size=X.shape)
    found = md.jit(md.grad(loss))(md.named(X, DIMS), md.named(g, DIMS))
    np.testing.assert_allclose(turned(np.asarray(found)), g, atol=5e-6)


def test_an_odd_number_of_features_is_an_error():
    with pytest.raises(ValueError, match="turned in pairs, but `kv` has size 7"):
        md.jit(lambda x: nn.rotary(x))(md.named(X[..., :7], DIMS))


def test_a_missing_dim_is_an_error():
    with pytest.raises(ValueError, match=r"rotary: no dim `lengths` in .* Did you mean `length`"):
        md.jit(lambda x: nn.rotary(x, "lengths"))(md.named(X, DIMS))


def buckets(distance, causal, count, most):
    """Returns the bucket of memory_position - position, as the text of the paper has it."""
    if not causal:
        count //= 2
        side = count if distance > 0 else 0
        return side + buckets(-abs(distance), True, count, most)
    behind, single = max(-distance, 0), count // 2
    if behind < single:
        return behind
    ratio = math.log(behind / single) / math.log(most / single)
    return min(single + int(ratio * (count - single)), count - 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("where", [{}, {"mesh": "rows:2", "layout": "length:rows"}])
def test_the_relative_bias_is_looked_up_by_buckets_of_distances(causal, where):
    table = RNG.normal(size=(8, 3))
    length, memory = md.dims(length=20, memory_length=40)
    found = md.jit(
        lambda t: nn.relative_bias(t, length, memory, causal, max_distance=16),
        backend="numpy",
        **where,
    )(md.named(table, ["buckets", "heads"]))
    assert found.dims.names == ("length", "memory_length", "heads")
    expected = [[table[buckets(m - q, causal, 8, 16)] for m in range(40)] for q in range(20)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (8, 20), (64, 256)])
@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_buckets_begin_where_they_do_in_exact_numbers(backend, count, most, causal):
    """The logarithms of float32 put no distance into another bucket, as 32 of 128 at a half."""
    length, memory = md.dims(length=3, memory_length=400)
    number = md.named(np.arange(count, dtype="float32"), ["buckets"])
    at = md.named(np.array([0, 200, 399], "int32"), ["length"])
    found = md.jit(
        lambda t, at: nn.relative_bias(t, length, memory, causal, most, "buckets", at),
        backend=backend,
    )(number, at)

    def exact(distance, causal, count):
        if not causal:
            return (count // 2 if distance > 0 else 0) + exact(-abs(distance), True, count // 2)
        behind, single = max(-distance, 0), count // 2
        rest = count - single
        begun = (behind**rest * single**i >= most**i * single**rest for i in range(1, rest))
        return behind if behind < single else single + sum(begun)

    expected = [[exact(m - q, causal, count) for m in range(400)] for q in (0, 200, 399)]
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_the_alibi_bias_grows_with_distance_more_for_the_first_heads():
    heads, group, length, memory = md.dims(heads=2, group=2, length=3, memory_length=5)
    found = md.jit(lambda: nn.alibi_bias([heads, group], length, memory))()
    slopes = np.array([[1 / 4, 1 / 16], [1 / 64, 1 / 256]])
    distance = np.abs(np.arange(5) - np.arange(3)[:, None])
    np.testing.assert_allclose(found, -slopes[..., None, None] * distance, rtol=1e-6)
