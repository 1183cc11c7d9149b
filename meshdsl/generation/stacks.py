"""Stacks of layers, taken apart one after the other.

A slice cannot be written over the stack that it is of. A program that took all stacks apart would
need room for all weights twice; so each stack has a program of its own, and is deleted then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshdsl import ops
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import Spec, named, spec
from meshdsl.tensors.tensor import Tensor

LAYERS = "layers"


class Stacks:
    """Takes the stacks of parameters apart: each becomes a tuple of a tensor for each layer.

    Args:
        stacked: dims and dtypes of the parameters.
        apart: the same afterwards.
        program: compiles a function for specs of its arguments, as `Place.program`.

    Raises:
        ValueError: `apart` has other tuples than these.
    """

    def __init__(self, stacked: Any, apart: Any, program: Callable[..., Any]) -> None:
        flat: Any = jax.tree_util.tree_flatten_with_path(stacked, is_leaf=_is_spec)
        leaves, self._tree = flat
        self._programs: list[tuple[str, int, Any] | None] = []
        for (keys, leaf), wanted in zip(leaves, self._tree.flatten_up_to(apart), strict=True):
            if _is_spec(wanted):
                self._programs.append(None)
                continue
            path, layers = path_of(keys), leaf.dims.find(LAYERS)
            one = spec(leaf.dims.without([LAYERS]), leaf.dtype)
            if layers is None or list(map(str, wanted)) != [str(one)] * layers.size:
                raise ValueError(
                    f"{path} {leaf} is not taken apart into its layers by `unrolled`: {wanted}"
                )
            number = spec([], "int32")
            compiled = program(_layer, [{path: leaf}, number])  # the path has the rules' scopes
            self._programs.append((path, layers.size, compiled))

    def __call__(self, params: Any) -> Any:
        """Returns parameters with their stacks taken apart; the stacks are deleted."""
        leaves = self._tree.flatten_up_to(params)
        for at, split in enumerate(self._programs):
            if split is not None:
                path, layers, program = split
                stack = leaves[at]
                leaves[at] = tuple(
                    program({path: stack}, named(np.int32(number), []))["params"][path]
                    for number in range(layers)
                )
                for array in jax.tree.leaves(stack):
                    if isinstance(array, jax.Array):
                        array.delete()
        return self._tree.unflatten(leaves)


def _layer(params: dict[str, Tensor], number: Tensor) -> dict[str, dict[str, Tensor]]:
    """Returns one layer of a stack."""
    ((path, stack),) = params.items()
    one = ops.dynamic_slice(stack, LAYERS, number, 1)
    return {"params": {path: ops.index(one, LAYERS, 0)}}


def _is_spec(node: Any) -> bool:
    return isinstance(node, Spec)
