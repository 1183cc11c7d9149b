"""Whether functions compute on every layout what they compute on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.tensors.dtypes import is_float
from tests.ops.agreement import arrays_of, assert_close

# Splits that divide and that do not, empty shards, both orders of two axes.
LAYOUTS = (
    ("x:2", "length:x"),
    ("x:7", "length:x"),
    ("x:8", "length:x"),
    ("x:2,y:2", "length:x+y"),
    ("x:2,y:3", "length:y+x; batch:-"),
    ("x:2,y:3", "length:x; batch:y"),
    ("x:4,y:2", "length:y; batch:x"),
)
ON_JAX = ("x:2,y:3", "length:x+y")


def assert_same_on_every_layout(
    functions: Sequence[Callable],
    *inputs: md.NamedArray,
    layouts: Sequence[tuple[str, str]] = LAYOUTS,
    on_jax: tuple[str, str] = ON_JAX,
) -> None:
    """Values and gradients are those of one device; on JAX, whose compiler is slow, the values.

    Args:
        functions: of tensors, each to a tensor or a list of them.
        layouts, on_jax: pairs of mesh and layout.
    """
    wrt = [i for i, x in enumerate(inputs) if is_float(x.dtype)]

    def values(*tensors: Any) -> Any:
        return [function(*tensors) for function in functions]

    def gradients(*tensors: Any) -> Any:
        found = []
        for seed, function in enumerate(functions):

            def total(*tensors: Any, function: Callable = function, seed: int = seed) -> Any:
                parts = jax.tree.leaves(function(*tensors))
                return sum((md.sum(md.sin(y) * _weights(y, seed)) for y in parts), start=0.0)

            found.append(md.grad(total, wrt)(*tensors))
        return found

    for computed in (values, gradients):
        expected = arrays_of(md.jit(computed, backend="numpy")(*inputs))
        cases = [("numpy", *case) for case in layouts]
        if computed is values:
            cases.append(("jax", *on_jax))
        for backend, mesh, layout in cases:
            found = arrays_of(md.jit(computed, mesh, layout, backend)(*inputs))
            for mine, other in zip(found, expected, strict=True):
                try:
                    assert_close(mine, other)
                except AssertionError as error:
                    error.add_note(f"{backend}, {mesh}, {layout}: {mine} is not {other}")
                    raise


def assert_same_values_on_every_layout(
    function: Callable,
    *inputs: md.NamedArray,
    layouts: Sequence[tuple[str, str]] = LAYOUTS,
    on_jax: tuple[str, str] = ON_JAX,
) -> None:
    """Results of any dtype are, to the last bit of integers, those of one device."""
    expected = arrays_of(md.jit(function, backend="numpy")(*inputs))
    cases = [("numpy", *case) for case in layouts] + [("jax", *on_jax)]
    for backend, mesh, layout in cases:
        found = arrays_of(md.jit(function, mesh, layout, backend)(*inputs))
        for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
            mine, other = np.asarray(mine), np.asarray(other)
            where = f"result {number} with {backend}, {mesh}, {layout}: {mine} is not {other}"
            assert mine.dtype == other.dtype, where
            if is_float(other.dtype):
                assert np.allclose(mine, other, 1e-10, 1e-10, equal_nan=True), where
            else:
                assert np.array_equal(mine, other), where


def _weights(y: Any, seed: int) -> md.NamedArray:
    data = np.random.default_rng(seed).uniform(-1, 1, y.shape.sizes)
    return md.named(data, list(y.shape))
