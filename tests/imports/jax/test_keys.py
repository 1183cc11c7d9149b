"""Typed keys of JAX as arguments, in between and as results: what JAX does with them is done."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

KEY = jax.random.key(7)
KEYS = jax.random.split(KEY, 4)
X = np.ones((4, 2), np.float32)


def draws(keys):
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)


def carried(key):
    def step(key, _):
        key, own = jax.random.split(key)
        return key, jax.random.uniform(own)

    return jax.lax.scan(step, key, None, 3)[1]


CASES = {
    "reversed": (lambda key: draws(jnp.flip(jax.random.split(key, 4))), (KEY,)),
    "rolled": (lambda key: draws(jnp.roll(jax.random.split(key, 4), 1)), (KEY,)),
    "counted": (lambda key: jnp.ones(jax.random.split(key, 4).size), (KEY,)),
    "with named rows": (lambda keys, x: draws(keys) + x, (KEYS, X)),
    "chosen": (lambda keys, n: draws(keys[n][None]), (KEYS, jnp.int32(2))),
    "repeated": (lambda keys: draws(jnp.repeat(keys, 2)), (KEYS,)),
    "broadcast": (lambda key: draws(jnp.broadcast_to(key, (3,))), (KEY,)),
    "joined": (lambda keys: draws(jnp.concatenate([keys, keys[:1]])), (KEYS,)),
    "turned": (lambda key: jax.random.split(key, (2, 3)).T, (KEY,)),
    "regrouped": (lambda key: jax.random.split(key, 6).reshape(2, 3), (KEY,)),
    "carried": (carried, (KEY,)),
    "raw": (lambda key: jax.random.uniform(key, (2,)), (jax.random.PRNGKey(3),)),
}


def words(value):
    typed = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if typed else value


@pytest.mark.parametrize("case", CASES)
def test_keys_are_those_of_jax(case):
    function, arguments = CASES[case]
    program = md.from_jax(function)
    run = md.jit(program, "a:2", backend="numpy")
    expected = function(*arguments)
    for given in (arguments, program.named(*arguments)):
        found = md.unnamed(run(*given))
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(words(found), words(expected), rtol=1e-6)


def test_positions_of_keys_have_the_names_of_the_program():
    program = md.from_jax(lambda keys, x: draws(keys) + x, {"x": "batch feature"})
    keys, _ = program.named(KEYS, X)
    assert keys.dims.names == ("batch", "random_key")
    shapes = program.named(jax.eval_shape(lambda: KEYS), jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert shapes[0].dims == keys.dims


def test_keys_of_another_kind_are_refused_with_their_path():
    key = jax.random.key(0, impl="rbg")
    with pytest.raises(ValueError, match=r"Threefry-2x32, and keys/a is key<rbg>: make them with"):
        md.from_jax(lambda keys: jax.random.uniform(keys["a"], (2,)))({"a": key})
