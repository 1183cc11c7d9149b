"""Callers: direct calls take any tree apart, and refuse every other one, as JAX's trees would."""

import collections
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.running import eager
from meshdsl.running.callers import MISS, REFUSED

row, odd = md.dims(row=8, odd=5)


class Pair(NamedTuple):
    first: object
    second: object


class Scaled(md.Module):
    weight: md.Tensor
    by: float = md.static(default=2.0)
    rest: object = None


class Box:
    """A node that only JAX knows."""

    def __init__(self, value, tag="tag"):
        self.value, self.tag = value, tag


jax.tree_util.register_pytree_node(
    Box, lambda box: ((box.value,), box.tag), lambda tag, children: Box(*children, tag)
)


def ones(dims=(row,), dtype=np.float32):
    return md.named(jnp.ones([d.size for d in dims], dtype), dims)


def trees(make=ones):
    return {
        "dict": {"b": make(), "a": {3: make(), 1: make()}, "it's": make()},
        "list": [make(), [], make()],
        "tuple": (make(), (), None),
        "named tuple": Pair(make(), None),
        "ordered": collections.OrderedDict(b=make(), a=[make()]),
        "module": Scaled(make(), 3.0, {"x": make()}),
        "box": Box({"x": make(), "y": [make()]}),
    }


def doubled(tree):
    return jax.tree.map(lambda x: x + x, tree, is_leaf=lambda x: isinstance(x, md.Tensor))


def armed(function, *args, **options):
    jitted = md.jit(function, **options)
    jitted(*args)
    assert jitted._direct.function is not None
    return jitted


def refused(jitted, *args):
    """Whether a direct call refuses arguments."""
    try:
        return jitted._direct.function(*args) is MISS
    except REFUSED:
        return True


@pytest.mark.parametrize("kind", trees())
def test_trees_of_any_kind_are_called_directly(kind):
    argument = trees()[kind]
    jitted = armed(doubled, argument)
    found = jitted._direct.function(argument)
    assert jax.tree.structure(found) == jax.tree.structure(argument)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, 2 * np.ones(8))


@pytest.mark.parametrize("kind", trees())
def test_trees_of_another_kind_are_refused(kind):
    jitted = armed(doubled, trees()[kind])
    others = [tree for name, tree in trees().items() if name != kind]
    makes = [partial(ones, dims) for dims in ((odd,), (row, odd), ())]
    makes += [partial(ones, dtype=np.int32), partial(np.ones, 8)]
    changed = [trees(make)[kind] for make in makes]
    for other in (*others, *changed, None, ones(), [trees()[kind]]):
        assert refused(jitted, other)
    assert refused(jitted)
    assert refused(jitted, trees()[kind], trees()[kind])
    assert not refused(jitted, trees()[kind])


def test_trees_that_nearly_fit_are_refused():
    near = {
        "dict": [
            trees()["dict"] | {"c": ones()},
            trees()["dict"] | {"a": {3: ones(), "1": ones()}},
            {name: tree for name, tree in trees()["dict"].items() if name != "b"},
        ],
        "list": [[ones(), [], ones(), ones()], [ones(), []], [ones(), [None], ones()]],
        "tuple": [(ones(), (), ones()), (ones(), [], None), (ones(), ())],
        "named tuple": [(ones(), None), Pair(None, ones())],
        "ordered": [dict(b=ones(), a=[ones()]), collections.OrderedDict(a=[ones()], b=ones())],
        "module": [Scaled(ones(), 4.0, {"x": ones()}), Scaled(ones(), 3.0)],
        "box": [Box({"x": ones(), "y": [ones()]}, "other"), Box({"x": ones(), "y": ones()})],
    }
    for kind, others in near.items():
        jitted = armed(doubled, trees()[kind])
        assert not refused(jitted, trees()[kind])
        for other in others:
            assert refused(jitted, other)


def test_calls_without_arguments_or_results_and_with_many():
    assert armed(lambda: {"x": md.ones([row])})._direct.function()["x"].dims == md.Shape([row])
    assert armed(lambda x: (), ones())._direct.function(ones()) == ()
    many = armed(lambda *xs: xs[::-1], *[ones() * i for i in range(300)])
    found = many._direct.function(*[ones() * i for i in range(300)])
    assert [float(x["row", 0]) for x in found[:3]] == [299, 298, 297]
    assert refused(many, *[ones()] * 299)


def test_pads_are_compared():
    x = md.place(ones((odd,)), "a:4", "odd:a")
    jitted = armed(lambda x: x + x, x, mesh="a:4", layout="odd:a")
    found = jitted._direct.function(x)
    np.testing.assert_array_equal(found, 2 * np.ones(5))
    assert found.cuts == x.cuts
    assert refused(jitted, ones((odd,)))
    assert refused(armed(lambda x: x + x, ones((odd,))), x)


def test_a_program_is_compiled_once_for_all_ways_of_calling_it():
    compiled = []

    def listen(name, seconds, **_):
        compiled.append(name)

    jitted = md.jit(lambda x, y: x * y)
    host = md.named(np.ones(8, np.float32), [row])
    jitted(ones(), 0.5)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for x in (ones(), host, jitted(ones(), ones() * 2)):
            for y in (0.5, x, np.float32(3)):
                if y is not x:
                    jitted(x, y)
        jitted(jax.device_put(ones(), jax.devices()[0]), 0.5)
    finally:
        jax.monitoring.clear_event_listeners()
    assert sum("backend_compile" in name for name in compiled) <= 2  # `x * y` of two arrays, `* 2`


def contexts():
    return {
        "mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("other",))),
        "device": lambda: jax.default_device(jax.devices()[2]),
        "precision": lambda: jax.default_matmul_precision("float32"),
    }


@pytest.mark.parametrize("name", contexts())
def test_a_call_in_another_context_of_jax_has_the_same_results(name):
    x = ones()
    jitted = armed(lambda x: x + x, x)
    thrice = x * 3
    for _ in range(3):
        with contexts()[name]():
            for _ in range(3):
                found = jitted(x)
                np.testing.assert_array_equal(found, 2 * np.ones(8))
                assert found.data.devices() == x.data.devices()
                np.testing.assert_array_equal(x * 3, thrice)
        np.testing.assert_array_equal(jitted(x), 2 * np.ones(8))
    for _ in range(2 * 64):  # after refusals it waits for 64 equal calls at most
        jitted(x)
    assert jitted._direct.function is not None


def test_arrays_of_a_weak_type_are_called_directly_after_one_refusal():
    with jax.enable_x64(False):
        weak = md.named(jnp.asarray(2.0), [])
        assert weak.data.weak_type
        jitted = armed(lambda x, y: x * y, ones(), md.named(jnp.float32(2), []))
        for _ in range(4):
            np.testing.assert_array_equal(jitted(ones(), weak), 2 * np.ones(8))
        assert not refused(jitted, ones(), weak)


def test_calls_survive_cleared_caches_of_jax():
    jitted = armed(lambda x: x + x, ones())
    for _ in range(2):
        jax.clear_caches()
        for _ in range(3):
            np.testing.assert_array_equal(jitted(ones()), 2 * np.ones(8))
            np.testing.assert_array_equal(md.sin(ones() * 0), np.zeros(8))


def test_what_jax_traces_is_not_called_directly():
    x = ones()
    jitted = armed(lambda x: md.sum(x * x), x)

    def through(data):
        return jitted(md.named(data, [row])).data

    np.testing.assert_array_equal(jax.grad(through)(x.data), 2 * np.ones(8))
    assert float(jax.jit(through)(x.data)) == 8
    assert jitted._direct.function is None  # it was refused
    np.testing.assert_array_equal(jitted(x), 8)


def test_disable_jit_changes_nothing():
    """A compiled program has no Python function that JAX could run instead."""
    jitted = armed(doubled, ones())
    with jax.disable_jit():
        assert float(md.sum(jitted(ones()))) == 16.0
        assert float(md.sum(md.jit(doubled)(ones()))) == 16.0
        assert float(md.sum(ones() * 3.0)) == 24.0
    for _ in range(4):
        jitted(ones())
    assert not refused(jitted, ones())  # calls are direct again


@pytest.mark.parametrize("mesh", ["", "m:4"])
def test_products_have_the_precision_of_the_context_in_which_they_are_called(mesh):
    def products(x, y):
        return md.einsum(x, y, over="b")

    def precise(runs):  # on CPUs the numbers are the same, so the compiled programs tell
        return ["operand_precision" in run.executable.compiled.as_text() for run in runs]

    eager.clear_cache()
    x, y = md.named(np.ones((4, 4)), ["a", "b"]), md.named(np.ones((4, 4)), ["b", "c"])
    if mesh:
        x, y = md.place(x, mesh, "a:m"), md.place(y, mesh, "a:m")
    jitted = armed(products, x, y, **({"mesh": mesh, "layout": "a:m"} if mesh else {}))
    products(x, y)
    for _ in range(2):
        with jax.default_matmul_precision("highest"):
            assert refused(jitted, x, y)
            jitted(x, y), products(x, y)
        jitted(x, y), products(x, y)
        assert precise(jitted._compiled.values()) == [False, True]
        assert precise(eager._programs.values()) == [False, True]
        for _ in range(64):
            jitted(x, y)
        assert not refused(jitted, x, y)
