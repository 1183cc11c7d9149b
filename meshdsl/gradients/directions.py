"""Derivatives beyond the gradient: along a direction, Jacobians, products with the Hessian.

They have the same kinds of operations as the function. So they are planned, costed and explained in
the same way, and can be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

import meshdsl.ops as ops
from meshdsl.gradients.autodiff import argument_numbers, of_leaves, value_and_grad
from meshdsl.gradients.replay import Cotangents, Replay
from meshdsl.gradients.tangents import push
from meshdsl.ops.control.body import is_array, leaves_of, subgraph
from meshdsl.ops.creation import as_tensor, zeros
from meshdsl.ops.operation import at_once, reported_as
from meshdsl.tensors.dims import Dimension, Shape, unused
from meshdsl.tensors.dtypes import is_complex, is_differentiable
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph


@at_once
def jvp(function: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Returns a function's value and its derivative along a direction, as `jax.jvp` does.

        value, tangent = md.jvp(f, (x, w), (x_direction, w_direction))

    This is forward mode. It costs about as much as two to three calls of the function. It keeps no
    values of the steps of loops, and works for `md.while_loop` too. The derivative of
    `md.attention` computes all scores, so its memory is quadratic in the length.

    Args:
        function: of trees of tensors, to a tree of tensors.
        primals: the arguments.
        tangents: for each argument a tree of the same structure: a tensor of the same dims and
            dtype for each leaf, or None for leaves, or for subtrees, that do not change.

    Returns:
        The value, and a tree of the same structure: zeros where the value does not depend on what
        changes, None for what is not floating-point. The results of `md.stop_gradient`, of rounding
        and of comparisons count as constants.

    Raises:
        ValueError: the tangents do not fit the primals; the error names all that do not.

    Examples:
        >>> x, along = md.named([1.0, 2.0], ["embed"]), md.named([0.0, 1.0], ["embed"])
        >>> value, tangent = md.jvp(lambda x: x * md.sum(x), (x,), (along,))
        >>> print(value, tangent)
        f32[embed=2] [3. 6.] f32[embed=2] [1. 5.]
    """
    with reported_as("jvp"):
        _need_tuples("jvp", primals, tangents)
        inputs, moving = _directions(tuple(primals), tuple(tangents))
    tree = jax.tree.structure(tuple(primals), is_leaf=is_array)

    def of_leaves(*leaves: Tensor) -> Any:
        return function(*jax.tree.unflatten(tree, leaves))

    graph, consts, structure = subgraph(of_leaves, inputs)
    values, derivatives = push(graph, [*consts, *inputs], [*(None for _ in consts), *moving])
    results = [
        zeros(t.shape, t.dtype) if d is None and is_differentiable(t.dtype) else d
        for t, d in zip(values, derivatives, strict=True)
    ]
    return jax.tree.unflatten(structure, values), jax.tree.unflatten(structure, results)


def _need_tuples(name: str, primals: Any, tangents: Any) -> None:
    for what, items in (("primals", primals), ("tangents", tangents)):
        if not isinstance(items, list | tuple):
            raise ValueError(
                f"give tuples, with one item per argument: md.{name}(f, (x,), (direction,)); the "
                f"{what} are of type {type(items).__name__}"
            )


@at_once
def hessian_vector_product(
    function: Callable, primals: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """Returns the product of a function's Hessian with a vector.

        product = md.hessian_vector_product(loss, (params, batch), (direction, None))

    It is the derivative of the gradient along the vector. It costs about as much as four calls of
    the function's gradient, and never computes the Hessian.

    Args:
        function: of the primals, to a scalar.
        tangents: the vector, as for `md.jvp`; None for arguments that the Hessian leaves out.

    Returns:
        The tree of the argument with a tangent; a tuple of trees for several.

    Raises:
        ValueError: no argument has a tangent, and what `md.jvp` and `md.grad` raise.

    Examples:
        >>> x, along = md.named([1.0, 2.0], ["embed"]), md.named([1.0, 0.0], ["embed"])
        >>> print(md.hessian_vector_product(lambda x: md.sum(x) ** 3, (x,), (along,)))
        f32[embed=2] [18. 18.]
    """
    with reported_as("hessian_vector_product"):
        _need_tuples("hessian_vector_product", primals, tangents)
        _directions(tuple(primals), tuple(tangents))
    about = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
    with reported_as("hessian_vector_product"):
        if not about:
            raise ValueError("give a tangent for at least one of the primals")
    slope = value_and_grad(function, about, named=False)
    _, products = jvp(lambda *args: slope(*args)[1], primals, tangents)
    return products[0] if len(about) == 1 else products


def jacobian(
    function: Callable,
    wrt: int | Sequence[int] = 0,
    mode: Literal["forward", "reverse"] | None = None,
) -> Callable:
    """Returns a function giving all derivatives of a function's result.

        slopes = md.jacobian(layer)(x)  # [*the result's dims, *x's dims]

    A dim of the input that the result has too is called `in_...` in the Jacobian: that of
    `[batch, embed] -> [batch, embed]` is [batch, embed, in_batch, in_embed]. Derivatives are
    computed one after another, in little memory: in forward mode one for each element of the
    input, in reverse mode one for each element of the result.

    Args:
        wrt: the number of the argument to differentiate by, or several.
        mode: by default the one with fewer passes.

    Returns:
        A tree like the result, of trees like the argument (tuples of them, for several), of
        tensors; None for what is not floating-point.

    Raises:
        ValueError: when called: `wrt` is the number of no argument, an unknown mode, or complex
            numbers.

    Examples:
        >>> x = md.named([1.0, 2.0], ["embed"])
        >>> print(md.jacobian(lambda x: x * md.sum(x))(x))
        f32[embed=2, in_embed=2] [[4. 1.]
         [2. 5.]]
    """

    @at_once
    @functools.wraps(function)
    def differentiated(*args: Any) -> Any:
        with reported_as("jacobian"):
            numbers = argument_numbers(wrt, args)
        inputs, tree = leaves_of([args[n] for n in numbers])
        graph, consts, structure = subgraph(of_leaves(function, args, numbers, tree), inputs)
        results = graph.outputs
        with reported_as("jacobian"):
            _check(mode, [*inputs, *results])
        columns, rows = (
            sum(t.shape.volume for t in some if is_differentiable(t.dtype))
            for some in (inputs, results)
        )
        forward = columns <= rows if mode is None else mode == "forward"
        if forward:
            parts = [_by_columns(graph, consts, inputs, n) for n in range(len(inputs))]
        else:
            by_rows = _by_rows(graph, consts, inputs)
            parts = [list(column) for column in zip(*by_rows, strict=True)]
        jacobians = []
        for number in range(len(results)):
            trees = jax.tree.unflatten(tree, [column[number] for column in parts])
            jacobians.append(trees[0] if isinstance(wrt, int) else tuple(trees))
        return jax.tree.unflatten(structure, jacobians)

    return differentiated


def _check(mode: str | None, tensors: Sequence[Tensor]) -> None:
    if mode not in (None, "forward", "reverse"):
        raise ValueError(f"mode={mode!r}: choose from forward, reverse")
    problems = [f"{t} (made at {t.source})" for t in tensors if is_complex(t.dtype)]
    if problems:
        raise ValueError(
            f"a Jacobian is of real numbers, not of {', '.join(problems)}; take md.real and md.imag"
        )


def _by_columns(
    graph: Graph, consts: Sequence[Tensor], inputs: Sequence[Tensor], number: int
) -> list[Tensor | None]:
    """Returns the derivatives of all results by one input, one pass per element of the input."""
    x = inputs[number]
    if not is_differentiable(x.dtype):
        return [None] * len(graph.outputs)
    still: list[Tensor | None] = [None] * (len(consts) + len(inputs))

    def along(direction: Tensor) -> list[Tensor]:
        tangents = [*still]
        tangents[len(consts) + number] = direction
        _, derivatives = push(graph, [*consts, *inputs], tangents)
        return [
            zeros(t.shape, t.dtype) if d is None else d
            for t, d in zip(graph.outputs, derivatives, strict=True)
            if is_differentiable(t.dtype)
        ]

    columns = iter(_each(x, along))
    return [
        _joined(next(columns), t.shape, x.shape) if is_differentiable(t.dtype) else None
        for t in graph.outputs
    ]


def _by_rows(
    graph: Graph, consts: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[list[Tensor | None]]:
    """Returns the derivatives of each result by all inputs, one pass per element of the result."""
    active = [False] * len(consts) + [is_differentiable(t.dtype) for t in inputs]
    replayed = Replay(graph, [*consts, *inputs], active)
    rows: list[list[Tensor | None]] = []
    for number, result in enumerate(replayed.outputs):
        if not is_differentiable(result.dtype):
            rows.append([None] * len(inputs))
            continue

        def along(direction: Tensor, number: int = number) -> list[Tensor]:
            cotangents: Cotangents = [None] * len(replayed.outputs)
            cotangents[number] = direction
            gradients = replayed.backward(cotangents)[len(consts) :]
            return [
                zeros(t.shape, t.dtype) if g is None else g.transpose(t.shape.names)
                for g, t in zip(gradients, inputs, strict=True)
                if is_differentiable(t.dtype)
            ]

        each = iter(_each(result, along))
        rows.append(
            [
                _crossed(next(each), result.shape, t.shape) if is_differentiable(t.dtype) else None
                for t in inputs
            ]
        )
    return rows


def _each(x: Tensor, along: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """Maps a function over the directions of the elements of x: stacked along `_COLUMN`."""
    element = Dimension(_ELEMENT, x.shape.volume)

    def one(number: Tensor) -> list[Tensor]:
        flat = ops.one_hot(number, element, x.dtype)
        if not x.shape:
            return along(ops.sum(flat, element))
        return along(ops.split(flat, element, x.shape))

    return list(ops.map(one, ops.arange(Dimension(_COLUMN, element.size)), _COLUMN))


_ELEMENT, _COLUMN = "jacobian_element", "jacobian_column"


def _aside(shape: Shape, *others: Shape) -> Shape:
    """Returns dims under temporary names that no other dim has."""
    return Shape(Dimension(unused(f"aside_{d.name}", shape, *others), d.size) for d in shape)


def _named(inputs: Shape, result: Shape) -> Shape:
    """Returns an input's dims under their names in the Jacobian."""
    dims: list[Dimension] = []
    for dim in inputs:
        name = dim.name
        while result.find(name) or any(name == d.name for d in dims):
            name = f"in_{name}"
        dims.append(Dimension(name, dim.size))
    return Shape(dims)


def _joined(columns: Tensor, result: Shape, inputs: Shape) -> Tensor:
    """Returns columns [column, *result] as [*result, *inputs]."""
    dims = _named(inputs, result)
    if not dims:
        return ops.index(columns, _COLUMN, 0)
    return ops.transpose(ops.split(columns, _COLUMN, dims), [*result.names, *dims.names])


def _crossed(rows: Tensor, result: Shape, inputs: Shape) -> Tensor:
    """Returns rows [column, *inputs] as [*result, *inputs]."""
    dims = _named(inputs, result)
    aside = _aside(inputs, result, dims)
    pairs = dict(zip(inputs.names, aside.names, strict=True))
    rows = ops.rename(rows, pairs) if inputs else rows
    rows = ops.split(rows, _COLUMN, result) if result else ops.index(rows, _COLUMN, 0)
    back = dict(zip(aside.names, dims.names, strict=True))
    rows = ops.rename(rows, back) if inputs else rows
    return ops.transpose(rows, [*result.names, *dims.names])


def _directions(
    primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the primals' leaves, and the tangent, or None, of each."""
    inputs, _ = leaves_of(primals)
    keyed, _ = jax.tree_util.tree_flatten_with_path(primals, is_leaf=is_array)
    like = {keys: tensor for (keys, _), tensor in zip(keyed, inputs, strict=True)}
    matched: dict[Any, Tensor] = {}
    still: list[Any] = []
    problems = []
    keyed_tangents, _ = jax.tree_util.tree_flatten_with_path(
        tangents, is_leaf=lambda value: value is None or is_array(value)
    )
    for keys, value in keyed_tangents:
        if value is None:
            still.append(keys)
            continue
        tensor, path = like.get(keys), path_of(keys, "tangents")
        if tensor is None:
            problems.append(f"{path} is the tangent of nothing: no tensor stands there")
            continue
        tangent = as_tensor(value, tensor.dtype)
        if not is_differentiable(tensor.dtype):
            problems.append(f"{path}: {tensor} has no tangent; give None")
        elif set(tangent.shape) != set(tensor.shape) or tangent.dtype != tensor.dtype:
            problems.append(f"{path} is {tangent} (made at {tangent.source}), not {tensor}")
        else:
            matched[keys] = tangent.transpose(tensor.shape.names)
    for keys, tensor in like.items():
        settled = keys in matched or any(keys[: len(stay)] == stay for stay in still)
        if not settled and is_differentiable(tensor.dtype) and not problems:
            problems.append(f"{path_of(keys, 'tangents')} is missing; None stands for no change")
    if problems:
        raise ValueError("the tangents do not fit the primals: " + "; ".join(problems))
    return inputs, [matched.get(keys) for keys in like]
