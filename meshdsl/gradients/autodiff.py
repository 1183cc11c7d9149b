"""Gradients of functions: the graph is differentiated before lowering.

The backward pass has the same kinds of operations as the forward pass. So it is planned, costed and
explained in the same way, and can be differentiated again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax

from meshdsl.gradients.replay import Cotangents, Replay
from meshdsl.gradients.stops import stopped_at
from meshdsl.ops import creation
from meshdsl.ops.control.body import is_array, leaves_of, subgraph
from meshdsl.ops.control.checkpoint import name
from meshdsl.ops.operation import at_once, operation, reported_as
from meshdsl.tensors.dtypes import is_differentiable, is_float, short
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, TracedTensor
from meshdsl.tracing.source import definition
from meshdsl.tracing.trace import current

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")  # the first argument


@overload
def value_and_grad(
    function: Callable[Concatenate[A, P], R],
    wrt: Literal[0] = 0,
    has_aux: bool = False,
    named: bool = True,
    zeros: bool = True,
) -> Callable[Concatenate[A, P], tuple[R, A]]: ...


@overload
def value_and_grad(
    function: Callable[..., R],
    wrt: int | Sequence[int],
    has_aux: bool = False,
    named: bool = True,
    zeros: bool = True,
) -> Callable[..., tuple[R, Any]]: ...


def value_and_grad(
    function: Callable,
    wrt: int | Sequence[int] = 0,
    has_aux: bool = False,
    named: bool = True,
    zeros: bool = True,
) -> Any:
    """Returns a function giving `function`'s value and its gradient.

    With `named`, layout rules know the gradient of the argument's leaf `params/w` as
    `gradients/params/w`. Leave it out where only a sum of such gradients is to have the name.

    The value must be a scalar (no dims); a pair `(value, aux)` with `has_aux`. The gradient has the
    tree of the argument number `wrt` (a tuple of trees for several). Arguments by keyword are
    constants. Leaves that are not floating-point get None. These leaves get zeros, or None without
    `zeros`: those that the value does not depend on, those that reach it only through
    `md.stop_gradient`, and those that only choose elements, as the indices of `md.top_k` do.
    Reports of the program name the last ones.

        loss, gradients = md.value_and_grad(loss)(params, batch)

    Raises:
        ValueError: when called: `wrt` is the number of no argument; the value is no floating-point
            scalar; or an input reaches it, but only through operations without a slope (rounding,
            comparisons, integers).

    Examples:
        >>> params = {"w": md.named([2.0, 3.0], ["embed"]), "bias": md.named(1.0, [])}
        >>> def loss(params, x):
        ...     return (md.einsum(params["w"], x, over="embed") + params["bias"]) ** 2
        >>> value, gradients = md.value_and_grad(loss)(params, md.named([1.0, -2.0], ["embed"]))
        >>> print(value, gradients["w"], gradients["bias"])
        f32[] 9. f32[embed=2] [-6. 12.] f32[] -6.
    """

    @at_once
    @_naming_as(function)
    @functools.wraps(function)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        with reported_as("gradient"):
            numbers = argument_numbers(wrt, args)
        chosen = [args[n] for n in numbers]
        inputs, tree = leaves_of(chosen)
        run = of_leaves(functools.partial(function, **kwargs), args, numbers, tree)

        def pair(*leaves: Tensor) -> Any:
            value, aux = _value_and_aux(function, run(*leaves), has_aux)
            return [value, aux]

        graph, consts, structure = subgraph(pair, inputs)
        active = [False] * len(consts) + [is_differentiable(t.dtype) for t in inputs]
        _gradient(graph.outputs[0])
        replayed = Replay(graph, [*consts, *inputs], active)
        value = replayed.outputs[0]
        cotangents: Cotangents = [creation.ones(value.shape, value.dtype)] + [None] * (
            len(replayed.outputs) - 1
        )
        arrived = replayed.backward(cotangents)[len(consts) :]
        lost = [i for i, g in enumerate(arrived, len(consts)) if g is None and active[i]]
        paths = _paths(function, numbers, chosen)
        _check_paths(graph, lost, [""] * len(consts) + paths)
        full = [
            _nothing(t, zeros) if g is None else g.transpose(t.shape.names)
            for g, t in zip(arrived, inputs, strict=True)
        ]
        gradients = [
            (name(g, f"gradients/{path}") if named and g is not None else g) if on else None
            for g, path, on in zip(full, paths, active[len(consts) :], strict=True)
        ]
        grads = jax.tree.unflatten(tree, gradients)
        value, aux = jax.tree.unflatten(structure, replayed.outputs)
        return ((value, aux) if has_aux else value), grads[0] if isinstance(wrt, int) else grads

    return differentiated


@overload
def grad(
    function: Callable[Concatenate[A, P], Any], wrt: Literal[0] = 0, has_aux: Literal[False] = False
) -> Callable[Concatenate[A, P], A]: ...


@overload
def grad(
    function: Callable, wrt: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]: ...


def grad(function: Callable, wrt: int | Sequence[int] = 0, has_aux: bool = False) -> Any:
    """Returns a function giving the gradient alone (or `(gradient, aux)`); see value_and_grad.

    `gradients = md.grad(loss)(params, batch)`.

    Raises:
        ValueError: when called: as of `md.value_and_grad`.

    Examples:
        >>> x = md.named([1.0, 2.0], ["embed"])
        >>> w = md.named([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]], ["embed", "d_ff"])
        >>> print(md.grad(lambda w: md.sum(md.einsum(x, w, over="embed") ** 2))(w))
        f32[embed=2, d_ff=3] [[ 2.  4.  8.]
         [ 4.  8. 16.]]
    """

    @at_once
    @_naming_as(function)
    @functools.wraps(function)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_grad(function, wrt, has_aux)(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def _naming_as(function: Callable) -> Callable[[Callable], Any]:
    """Returns a decorator: a function with the same arguments names plain arrays as `function`.

    Programs of `md.from_jax` and `md.from_equinox` do so.
    """

    def decorate(derived: Any) -> Any:
        for each in ("name_arguments", "names_static"):
            if hasattr(function, each):
                setattr(derived, each, getattr(function, each))
        return derived

    return decorate


def argument_numbers(wrt: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    """Returns the numbers, from 0, of the arguments to differentiate by.

    Raises:
        ValueError: there are no such arguments; all of these numbers are listed.
    """
    numbers = (wrt,) if isinstance(wrt, int | str) else tuple(wrt)
    wrong = [n for n in numbers if not isinstance(n, int) or not -len(args) <= n < len(args)]
    if wrong:
        raise ValueError(
            f"wrt={', '.join(map(repr, wrong))}: give numbers of arguments by position, from 0; "
            f"there are {len(args)} of these"
        )
    return tuple(n % len(args) for n in numbers)


def of_leaves(
    function: Callable, args: Sequence[Any], numbers: Sequence[int], tree: Any
) -> Callable[..., Any]:
    """Returns a function of the leaves of some of the arguments; the others are fixed.

    Args:
        tree: the structure of the list of the arguments with these numbers.
    """

    def run(*leaves: Tensor) -> Any:
        full = list(args)
        for number, part in zip(numbers, jax.tree.unflatten(tree, leaves), strict=True):
            full[number] = part
        return function(*full)

    return run


def _nothing(like: Tensor, zeros: bool) -> Tensor | None:
    """Returns the gradient for a leaf that the value does not depend on."""
    return creation.zeros(like.shape, like.dtype) if zeros else None


def _value_and_aux(function: Callable, result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    name = f"`{getattr(function, '__name__', type(function).__name__)}` ({definition(function)})"
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(f"with has_aux, the function {name} must return a pair: (value, aux)")
    value, aux = result if has_aux else (result, None)
    if not isinstance(value, TracedTensor):
        hint = "; with more results, return (value, aux) and pass has_aux=True"
        kind = type(value).__name__
        raise ValueError(f"the function {name} must return one tensor, not a {kind}{hint}")
    return value, aux


def _paths(function: Callable, numbers: Sequence[int], chosen: Sequence[Any]) -> list[str]:
    """Returns the paths of the leaves of some arguments of a function."""
    names = list(inspect.signature(function).parameters)
    paths = []
    for number, tree in zip(numbers, chosen, strict=True):
        root = names[number] if number < len(names) else f"argument {number}"
        keyed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_array)
        paths += [path_of(keys, root) for keys, _ in keyed]
    return paths


def _check_paths(graph: Graph, lost: Sequence[int], paths: Sequence[str]) -> None:
    """Raises ValueError that names all inputs without a gradient that reach the value.

    For inputs that only choose elements, on every path, the program gets a note.
    """
    problems = []
    for number in lost:
        stops = stopped_at(graph, number)
        what = f"{paths[number]} ({graph.inputs[number]})"
        # Choices jump on purpose, as in routers.
        jumps = [stop for stop in stops if not stop.primitive.chooses]
        if jumps:  # they come first: the user must fix these
            stops = (*jumps, *(stop for stop in stops if stop not in jumps))
            lines = [f"{stop.name} at {stop.source}  {stop.source.code}" for stop in stops]
            problems.append(f"{what} reaches the value only through {', '.join(_few(lines))}")
        elif stops:
            by = ", ".join(_few([f"{stop.name} at {stop.source}" for stop in stops]))
            current().note(
                f"{what} decides only which elements are chosen, by {by}: its gradient is zero"
            )
    with reported_as("gradient"):
        if problems:
            raise ValueError(
                "there is no differentiable path: "
                + "; ".join(problems)
                + "; md.stop_gradient(...) marks a constant, md.custom_gradient gives a slope"
            )


def _few(lines: Sequence[str], limit: int = 4) -> list[str]:
    """Returns the first few of some texts, without repetition, and how many more there are."""
    lines = list(dict.fromkeys(lines))
    return lines[:limit] + [f"{len(lines) - limit} more"] * (len(lines) > limit)


@operation
def _gradient(value: Tensor) -> None:
    """Raises ValueError unless `value` can have a gradient."""
    if value.shape or not is_float(value.dtype):
        fixes = ["reduce it first, as in md.mean(x)"] if value.shape else []
        if value.dtype.kind == "c":
            fixes.append("take its real part, as in md.real(x)")
        elif not is_float(value.dtype):
            fixes.append("compute it with floats: cast what it is made of, md.cast(x, 'float32')")
        raise ValueError(
            f"only a floating-point tensor without dims has a gradient, got "
            f"{short(value.dtype)}{value.shape} (made at {value.source}); {', and '.join(fixes)}"
        )
