"""Tensors from nothing: what they hold, on every layout, and what cannot be made."""

import numpy as np
import pytest

import meshdsl as md
from tests.ops.agreement import message, random, run

a, b = md.dims(a=6, b=4)
LAYOUTS = [("x:2,y:2", "a:x; b:y"), ("x:2,y:2", "b:y+x"), ("x:3,y:1", "a:x+y"), ("x:1", "a:x")]


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_every_shard_is_a_part_of_the_whole(mesh, layout, backend):
    def make():
        ramp = md.outer(md.add, md.arange(a), 10 * md.arange(b))
        return [ramp, md.arange(b, "float64"), md.full([b, a], 2.5), md.ones([b], bool)]

    found = run(make, mesh=mesh, layout=layout, backend=backend)
    expected = [
        np.arange(6, dtype=np.int32)[:, None] + 10 * np.arange(4, dtype=np.int32),
        np.arange(4.0),
        np.full((4, 6), 2.5, np.float32),
        np.ones(4, bool),
    ]
    for mine, want in zip(found, expected, strict=True):
        assert mine.dtype == want.dtype
        assert np.array_equal(mine, want)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_literals_are_part_of_the_program(backend):
    x, y = random([a, b]), random([b], seed=1)
    found = run(lambda x: x + y, x, mesh="x:2,y:2", layout="a:x; b:y", backend=backend)
    assert np.array_equal(found, x.data + y.data)


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_zero_keeps_its_sign(backend):
    for kind in (float, np.float64, np.float32):
        found = run(
            lambda: [1 / md.full([], kind(zero), "float64") for zero in (0.0, -0.0)],  # noqa: B023
            backend=backend,
        )
        assert [float(f) for f in found] == [np.inf, -np.inf]


def test_nothing_gives_a_bare_name_a_size():
    assert "full: 'a', 'c' has no size here; give a md.Dimension" in message(
        lambda: md.full(["a", b, "c"], 1)
    )
    assert "arange: 'a' has no size here" in message(lambda: md.arange("a"))
    assert "'a' has no size here" in message(lambda: md.one_hot(md.arange(b), "a"))


def test_numbers_that_the_dtype_does_not_hold_are_told():
    assert "full: int32 holds whole numbers from -2147483648 to 2147483647, not 1.5" in message(
        lambda: md.full(a, 1.5, "int32")
    )
    assert "uint32 holds whole numbers from 0 to 4294967295, not -1" in message(
        lambda: md.full(a, -1, "uint32")
    )


def test_unknown_dtypes_are_told_with_the_known_ones():
    text = message(lambda: md.zeros(a, "float31"))
    assert "unknown dtype 'float31'; choose one of bool, int8," in text


def test_what_is_made_outside_a_traced_function_is_an_array():
    assert np.array_equal(md.zeros([a]), np.zeros(a.size))
    assert np.array_equal(md.arange(a), np.arange(a.size))


def test_equal_numbers_are_one_constant_but_zeros_keep_their_signs():
    def scaled(x):
        return x * 0.5 + 0.5, x * 0.0, x * -0.0

    x = md.named(np.ones(4, "float32"), [md.Dimension("length", 4)])
    graph = md.jit(scaled).trace(x)
    constants = [op.params["value"] for op in graph.operations if op.name == "full"]
    assert list(map(str, constants)) == ["0.5", "0.0", "-0.0"]
    half, plus, minus = map(np.asarray, md.jit(scaled, backend="numpy")(x))
    assert half.tolist() == [1.0] * 4
    assert not np.signbit(plus).any()
    assert np.signbit(minus).all()
