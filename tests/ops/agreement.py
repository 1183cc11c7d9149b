"""What a function of named tensors computes, against the same function written for JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.tensors.dtypes import is_float

TOLERANCE = 1e-10


def random(dims: Sequence[md.Dimension], low: float = -1.0, high: float = 1.0, seed: int = 0):
    """Returns float64 numbers uniform on [low, high)."""
    data = np.random.default_rng(seed).uniform(low, high, [dim.size for dim in dims])
    return md.named(data, list(dims))


def arrays_of(tree: Any) -> list[md.NamedArray]:
    """Returns the arrays of a tree; their data may be padded, `np.asarray` of them is not."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, md.NamedArray))


def assert_close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.array_equal(found[~finite], expected[~finite], equal_nan=True)
    scale = max(1.0, np.abs(expected[finite]).max(initial=0.0))
    error = np.abs(found[finite] - expected[finite]).max(initial=0.0)
    assert error <= tolerance * scale, f"off by {error:.3g} at scale {scale:.3g}"


def run(function: Callable, *inputs: Any, backend: str = "numpy", **kwargs: Any) -> Any:
    """Returns the result of a function of tensors; on one device, without `mesh` and `layout`."""
    return md.jit(function, backend=backend, **kwargs)(*inputs)


def assert_tangents_agree(
    function: Callable,
    reference: Callable,
    inputs: Sequence[md.NamedArray],
    wrt: Sequence[int],
    tolerance: float = TOLERANCE,
) -> None:
    """The derivative along a direction is that of `jax.jvp`."""
    ways = [random(inputs[i].dims, seed=50 + i) for i in wrt]

    def along(function: Callable, given: Sequence[Any], ways: Sequence[Any], jvp: Callable) -> Any:
        def moving(*moved: Any) -> Any:
            full = list(given)
            for i, one in zip(wrt, moved, strict=True):
                full[i] = one
            return function(*full)

        return jvp(moving, tuple(given[i] for i in wrt), tuple(ways))[1]

    def ours(given: Sequence[Any], ways: Sequence[Any]) -> Any:
        return along(function, given, ways, md.jvp)

    found = run(ours, list(inputs), ways)
    arrays = [np.asarray(a.data) for a in inputs]
    expected = along(reference, arrays, [way.data for way in ways], jax.jvp)
    assert_close(found, expected, tolerance)


def assert_agree(
    function: Callable,
    reference: Callable,
    *inputs: md.NamedArray,
    order: int = 1,
    tolerance: float = TOLERANCE,
    forward: bool = True,
) -> None:
    """Values and derivatives of `function` are those of `reference`.

    Args:
        function: of tensors, to one floating-point tensor.
        reference: of arrays, to an array with axes in the order of the tensor's dims.
        order: 0: values; 1: gradients by all floating-point inputs, and the derivative along a
            direction; 2: gradients of those gradients as well.
        forward: whether the reference has derivatives along directions.
    """
    arrays = [np.asarray(a.data) for a in inputs]
    value = run(function, *inputs)
    expected = reference(*arrays)
    assert_close(value, expected, tolerance)
    if order == 0:
        return
    weights = random(value.dims, seed=99)
    wrt = [i for i, a in enumerate(inputs) if is_float(a.dtype)]

    def ours(*tensors: Any) -> Any:
        return md.sum(function(*tensors) * weights)

    def theirs(*tensors: Any) -> Any:
        return (reference(*tensors) * weights.data).sum()

    gradient, expected_gradient = md.grad(ours, wrt), jax.grad(theirs, wrt)
    for mine, other in zip(run(gradient, *inputs), expected_gradient(*arrays), strict=True):
        assert_close(mine, other, tolerance)
    if forward:
        assert_tangents_agree(function, reference, inputs, wrt, tolerance)
    if order == 1:
        return
    again = [random(inputs[i].dims, seed=7 + i) for i in wrt]

    def ours_again(*tensors: Any) -> Any:
        found = gradient(*tensors)
        return sum((md.sum(md.sin(g) * w) for g, w in zip(found, again, strict=True)), 0.0)

    def theirs_again(*tensors: Any) -> Any:
        found = expected_gradient(*tensors)
        return sum((jax.numpy.sin(g) * w.data).sum() for g, w in zip(found, again, strict=True))

    second, expected_second = md.grad(ours_again, wrt), jax.grad(theirs_again, wrt)
    for mine, other in zip(run(second, *inputs), expected_second(*arrays), strict=True):
        assert_close(mine, other, tolerance)


def message(function: Callable, *inputs: Any, **kwargs: Any) -> str:
    """Returns the text of the ValueError that tracing `function` raises."""
    try:
        md.jit(function, **kwargs).trace(*inputs)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was wrong")
