"""`md.from_equinox`: a function of models of Equinox as a function of named tensors.

A model of Equinox holds functions and numbers beside its arrays. They become `Static` nodes of the
trees that programs take and return. The function sees its models as Equinox has them.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshdsl.imports.jax.annotations import Names
from meshdsl.imports.jax.function import FromJax
from meshdsl.tensors.module import path_of
from meshdsl.tensors.named_array import Spec, is_named
from meshdsl.tensors.static import Static, without_static
from meshdsl.tensors.tensor import Tensor

_ARRAYS = (Tensor, Spec, jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def from_equinox(
    function: Callable[..., Any], names: Names = None, roll: str | None = None
) -> FromEquinox:
    """Makes a program over named dims of a function of Equinox's models, as they are.

        program = md.from_equinox(train_step, names={"image": "batch pixel"})
        step = md.jit(program, mesh="data:2,model:4", layout="batch:data")
        model, state, loss = step(model, state, image)  # model: an equinox.Module

    It is `md.from_jax` as `equinox.filter_jit` is `jax.jit`. Arrays are computed with. All else in
    arguments and results, such as functions, numbers and text, is static: the program is traced
    anew where it differs.

    Args:
        function: takes and returns trees of arrays and other values; `equinox.filter_jit` could
            take it. `equinox.filter_value_and_grad` and optax may be used inside of it.
        names: as of `md.from_jax`: `{"model/layers/0/weight": "hidden _"}`.
        roll: as of `md.from_jax`.

    Returns:
        A function as of `md.from_jax`. `md.unnamed` makes models of the results that can be called.
        The gradient of `md.grad` has the static values too, as optimizers of `md.optim` want it;
        `equinox.filter_grad` inside of the function has None there.

    Raises:
        ValueError: as of `md.from_jax`; `function` is a model itself, which has to be an argument;
            when called: a value that is no array is not hashable.

    Examples:
        >>> import equinox as eqx, jax
        >>> model = eqx.nn.MLP(4, 2, width_size=8, depth=1, key=jax.random.key(0))
        >>> def apply(model, x):
        ...     return jax.vmap(model)(x)
        >>> names = {"x": "batch embed", "model/layers/0/weight": "hidden _"}
        >>> run = md.jit(md.from_equinox(apply, names), "data:2,model:2", "hidden:model")
        >>> run(model, np.ones((8, 4), "float32")).dims
        [batch=8, layers_1_weight_0=2]
    """
    return FromEquinox(function, names, roll)


class FromEquinox(FromJax):
    """A function of models of Equinox over named dims; see `from_equinox`."""

    word = "from_equinox"
    names_static = True

    def __init__(
        self, function: Callable[..., Any], names: Names = None, roll: str | None = None
    ) -> None:
        super().__init__(function, names, roll)
        model = getattr(function, "__self__", function)
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model)):
            raise ValueError(
                f"from_equinox: {self.__name__} is a model, or a method of one, whose arrays would "
                "be constants of the program; give a function of it: lambda model, x: model(x)"
            )

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        bound = super()._bound(args, kwargs)
        bound.arguments = _with_static(OrderedDict(bound.arguments))
        return bound

    def _opened(self, arguments: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
        return without_static(arguments)

    def _closed(self, result: Any) -> Any:
        return _with_static(result, "return")


def _with_static(tree: Any, name: str = "") -> Any:
    """Returns a tree with `Static` nodes for what is no array.

    Raises:
        ValueError: such a value is not hashable; all are listed.
    """
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    problems = []
    leaves: list[Any] = []
    for keys, leaf in keyed:
        if isinstance(leaf, _ARRAYS):
            leaves.append(leaf)
            continue
        try:
            hash(leaf)
        except TypeError:
            what = f"{type(leaf).__name__} is no array, and not hashable"
            problems.append(f"  {path_of(keys, name)}: {what}")
        leaves.append(Static(leaf))
    if problems:
        advice = "make it an array, or a tree of arrays, or leave it out"
        raise ValueError("\n".join([f"from_equinox: {advice}:", *problems]))
    return jax.tree.unflatten(structure, leaves)
