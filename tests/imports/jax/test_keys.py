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
    "of a wide seed": (lambda n: jax.random.uniform(jax.random.key(n), (2,)), (np.int64(2**40),)),
    "of a seed below zero": (
        lambda n: jax.random.uniform(jax.random.key(n), (2,)),
        (np.int32(-1),),
    ),
    "of a known seed": (lambda x: x + jax.random.uniform(jax.random.key(2**40 + 1), (4, 2)), (X,)),
    "of another known seed": (lambda x: x + jax.random.uniform(jax.random.key(-5), (4, 2)), (X,)),
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


def test_keys_of_another_kind_are_refused_where_they_are_made():
    with pytest.raises(ValueError, match=r"random_seed.* of keys of the kind key<rbg>; make them"):
        md.from_jax(lambda x: x + jax.random.uniform(jax.random.key(0, impl="rbg"), (4, 2)))(X)


def test_raw_keys_have_one_name_wherever_they_come_from():
    def split(one, other):
        return jax.random.split(one)[0], jax.random.split(other)[0]

    raw = [jax.random.PRNGKey(n) for n in range(2)]
    program = md.from_jax(split)
    given = program.named(*raw)
    assert [key.dims.names for key in (*given, *program(*given))] == [("raw_key",)] * 4


@pytest.mark.parametrize("first", [True, False])
def test_a_name_that_the_user_gives_to_words_of_raw_keys_stands(first):
    def joined(keys, key):
        drawn = jax.random.uniform(key, (2,)) if first else 0
        every = jnp.concatenate([keys, key[None]])
        return every, drawn + jax.random.uniform(key, (2,))

    program = md.from_jax(joined, {"keys": "step words"})
    key = jax.random.PRNGKey(0)
    assert [x.dims.names[-1] for x in program.named(jax.random.split(key), key)] == ["words"] * 2
