"""Initializers: the spread they promise, the same on every layout."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.nn import initializers

embed, heads, kv = md.dims(embed=64, heads=8, kv=16)
KEY = md.random.key(3)


def made(initializer, dims, dtype="float32", **where):
    return md.jit(lambda key: initializer(key, dims, dtype), **where)(KEY)


def test_fan_in_divides_by_the_root_of_what_is_contracted():
    found = np.asarray(made(initializers.fan_in(over=embed), [embed, heads, kv]))
    assert found.shape == (64, 8, 16)
    assert abs(found.mean()) < 0.005
    assert found.std() == pytest.approx(1 / 8, rel=0.03)


def test_fan_in_takes_names_several_dims_and_a_gain():
    found = made(initializers.fan_in(["heads", "kv"], gain=2.0), [heads, kv, embed])
    assert np.asarray(found).std() == pytest.approx(2 / 128**0.5, rel=0.03)


def test_normal_zeros_and_ones():
    assert np.asarray(made(initializers.normal(0.02), [embed, kv])).std() == pytest.approx(
        0.02, rel=0.05
    )
    assert not np.asarray(made(initializers.zeros, [embed])).any()
    ones = made(initializers.ones, embed, "bfloat16")
    assert ones.dtype.name == "bfloat16"
    assert (np.asarray(ones) == 1).all()


def test_values_do_not_depend_on_the_layout():
    initializer = initializers.fan_in(over=embed)
    split = made(
        initializer, [embed, heads], mesh="data:2,model:4", layout="embed:data; heads:model"
    )
    np.testing.assert_array_equal(split, made(initializer, [embed, heads]))


def test_a_dim_that_the_parameter_lacks_is_an_error():
    with pytest.raises(ValueError, match=r"no dim `embd` in \[embed=64, kv=16\]. Did you mean"):
        made(initializers.fan_in("embd"), [embed, kv])
