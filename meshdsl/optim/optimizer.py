"""The protocol of optimizers, and their common parts: masks, trees that mirror the parameters.

An optimizer is a frozen dataclass of hyperparameters; its two methods are traced with the step.
Its state mirrors the parameters: same dims, and paths such as
`state/optimizer/mean/params/blocks/attention/query`. So a layout rule for parameters (`params/...`)
applies to the trees that mirror them too. A rule for the state alone is written `optimizer/...`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax

import meshdsl.ops as ops
from meshdsl.ops.operation import of_trees
from meshdsl.optim.checks import need_alike, need_tensors
from meshdsl.optim.schedules import Schedule
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import accumulator, is_complex, is_float
from meshdsl.tensors.module import Module, path_of
from meshdsl.tensors.tensor import Tensor

Mask: TypeAlias = Callable[[str, Shape], bool]
"""Chooses parameters: a function of a parameter's path and shape.

    def mask(path, shape):  # all but the biases decay
        return not path.endswith("bias")

    optimizer = md.optim.AdamW(1e-3, weight_decay=0.1, mask=mask)

Optimizers take `is_matrix` by default. `Excluding` leaves out parameters by their paths. Masks are
called while the step is traced, once for each parameter.
"""
STACKED = ("layers",)  # dims of several parameters in one


class Optimizer(Protocol):
    """Computes new parameters from gradients.

    Examples:
        >>> class SignDescent:
        ...     learning_rate = 0.5
        ...     def init(self, params):
        ...         return None
        ...     def update(self, grads, state, params, step):
        ...         step = lambda path, g, p: (p - self.learning_rate * md.sign(g),)
        ...         return md.optim.update_each(step, params, grads)[0], state
        >>> optimizer: md.optim.Optimizer = SignDescent()
        >>> x, g = md.named([1.0, 1.0], ["embed"]), md.named([5.0, -0.1], ["embed"])
        >>> params, state = optimizer.update(g, None, x, 0)
        >>> print(params)
        f32[embed=2] [0.5 1.5]
    """

    @property
    def learning_rate(self) -> float | Schedule | None:
        """The step size, or a schedule of it; None if it is not known."""

    def init(self, params: Any) -> Any:
        """Returns the initial state."""

    def update(self, grads: Any, state: Any, params: Any, step: Tensor) -> tuple[Any, Any]:
        """Returns the parameters and the state after one step.

        Args:
            grads: a tree like `params`; where it has None, the parameter does not change. A
                gradient may lack dims of its parameter: it is the same along them.
            step: int32 without dims, the number of steps before this one.
        """


class Mirror(Module):
    """A tree like the parameters; its paths contain `params`.

    Examples:
        >>> mean = md.optim.Mirror({"w": md.zeros(md.dims(embed=2))})
        >>> total = md.jit(lambda optimizer: md.sum(optimizer.params["w"]))
        >>> total.trace(mean).input_paths  # rules for `params/...` apply, and for `optimizer/...`
        ('optimizer/params/w',)
    """

    params: Any


def is_matrix(path: str, shape: Shape) -> bool:
    """Whether a parameter is no scale and no bias: by its name and two dims besides `layers`.

    The name counts because a bias of several heads has two dims too.

    Examples:
        >>> shape = md.Shape(md.dims(layers=2, heads=4, kv=8))
        >>> [md.optim.is_matrix(path, shape) for path in ("blocks/query", "blocks/query_bias")]
        [True, False]
    """
    name = path.rpartition("/")[2]
    return len(shape.without(STACKED)) >= 2 and not name.endswith(("bias", "scale"))


def lies_like(params: Any, before: Any, after: Any) -> list[Any]:
    """Returns, for each leaf of a tree that an optimizer returns, the array that it lies like.

    That is the array at its path before, if it is on a mesh; else the parameter at its path below
    a Mirror, or at the end of its path; else None.

    Args:
        before: the tree that `after` follows on, or None.
    """
    own, old = _by_path(params), _by_path(before)
    examples: list[Any] = []
    keyed, _ = jax.tree_util.tree_flatten_with_path(after, is_leaf=_is_part)
    for keys, part in keyed:
        root = path_of(keys)
        mirror = isinstance(part, Mirror)
        for path in _by_path(part):
            full = f"{root}/{path}".strip("/")
            kept = old.get(full)
            if getattr(kept, "layout", None) is not None:
                examples.append(kept)
            elif mirror:
                examples.append(own.get(path.removeprefix("params").removeprefix("/")))
            else:
                parts = full.split("/")
                ends = ("/".join(parts[start:]) for start in range(len(parts) + 1))
                examples.append(next((own[end] for end in ends if end in own), None))
    return examples


def _by_path(tree: Any) -> dict[str, Any]:
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_tensor)
    return {path_of(keys): leaf for keys, leaf in keyed}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_part(value: Any) -> bool:
    return isinstance(value, Mirror | Tensor)


def updated_like(params: Any, state: Any, result: tuple[Any, Any]) -> list[Any]:
    """Returns the same for new parameters and a new state."""
    return lies_like(params, params, result[0]) + lies_like(params, state, result[1])


def _zeros_lie_like(args: Sequence[Any], zeros: Any) -> list[Any]:
    return lies_like(args[0], None, zeros)


def _each_lies_like(args: Sequence[Any], result: tuple[Any, Any]) -> list[Any]:
    _, params, _, *states = args
    return updated_like(params, states, result)


def _prepared_zeros(params: Any, dims: Any) -> tuple[Any, Any]:
    need_tensors("params", params)
    return params, dims


def _prepared_update(function: Any, params: Any, grads: Any, *states: Mirror) -> tuple[Any, ...]:
    need_tensors("params", params)
    need_alike(params, "grads", grads)
    return function, params, grads, *states


@of_trees(_prepared_zeros, _zeros_lie_like)
def zeros_like(
    params: Any, dims: Callable[[str, Shape], Shape | None] = lambda path, shape: shape
) -> Mirror:
    """Returns zeros for every floating-point parameter, in `accumulator`; None for the others.

        optim.zeros_like(params)

    Args:
        dims: (path, shape) -> the dims of a parameter's zeros; None for none.

    Examples:
        >>> params = {"w": md.ones(md.dims(embed=2), "bfloat16"), "steps": md.named(3, [])}
        >>> zeros = md.jit(md.optim.zeros_like)(params)
        >>> print(zeros.params["w"], zeros.params["steps"])
        f32[embed=2] [0. 0.] None
    """

    def zero(keys: Any, p: Tensor) -> Tensor | None:
        shape = dims(path_of(keys), p.shape) if is_float(p.dtype) else None
        return None if shape is None else ops.zeros(shape, accumulator(p.dtype))

    return Mirror(jax.tree_util.tree_map_with_path(zero, params))


@of_trees(_prepared_update, _each_lies_like)
def update_each(
    function: Callable[..., Sequence[Any]], params: Any, grads: Any, *states: Mirror
) -> tuple[Any, list[Mirror]]:
    """Updates every parameter on its own.

    Args:
        function: (path, gradient, *states, parameter) -> (parameter, *states), all but the path in
            the `accumulator` dtype of the parameter; the result is cast back here. A state is None
            where a parameter has none. It is not called without a gradient.

    Returns:
        The parameters and the states.

    Raises:
        ValueError: a parameter with a gradient is complex, or the gradients are no tree like the
            parameters.

    Examples:
        >>> def step(path, g, velocity, p):
        ...     velocity = 0.9 * velocity + g
        ...     return p - 0.1 * velocity, velocity
        >>> @md.jit
        ... def train_step(params, grads):
        ...     return md.optim.update_each(step, params, grads, md.optim.zeros_like(params))
        >>> params, g = {"w": md.ones(md.dims(embed=2))}, md.named([1.0, -1.0], ["embed"])
        >>> params, [velocity] = train_step(params, {"w": g})
        >>> print(params["w"], velocity.params["w"])
        f32[embed=2] [0.9 1.1] f32[embed=2] [ 1. -1.]
    """

    def one(keys: Any, p: Tensor, g: Tensor | None, *own: Any) -> _Results:
        if g is None:
            return _Results((p, *own))
        if is_complex(p.dtype):
            raise ValueError(
                f"{path_of(keys)} is {p}, but optimizers update real numbers: keep its real and "
                "imaginary parts as two parameters"
            )
        work = accumulator(p.dtype)
        updated = function(path_of(keys), ops.cast(g, work), *own, ops.cast(p, work))
        return _Results((ops.cast(updated[0], p.dtype), *updated[1:]))

    mirrored = (state.params for state in states)
    rows = jax.tree_util.tree_map_with_path(one, params, grads, *mirrored)

    def column(number: int) -> Any:
        return jax.tree.map(lambda row: row.values[number], rows)

    return column(0), [Mirror(column(1 + number)) for number in range(len(states))]


@dataclass(frozen=True)
class _Results:
    """The results of one parameter's update, as a single leaf of a tree."""

    values: tuple[Any, ...]
