"""Gradient accumulation: computes a batch in parts, one after another, and adds up the gradients.

Every leaf with the batch dim is split into `[batch, microbatch]`, the microbatch minor. So each
device splits its own rows among the microbatches, and nothing moves if the number of devices
divides the rows of a microbatch. A scan over `microbatch` adds up the gradients, in float32 at
least. Nothing in the scan reads the sums: partial sums stay partial, and are reduced once, after
it. Means over the batch are the same as without microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.gradients.autodiff import value_and_grad
from meshdsl.ops.control.checkpoint import name
from meshdsl.ops.random import KEY, split
from meshdsl.tensors.dims import RAW_KEY, Dimension, Shape
from meshdsl.tensors.dtypes import accumulator, is_differentiable
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Operation
from meshdsl.tracing.source import Source
from meshdsl.tracing.trace import current, located

MICROBATCH = "microbatch"


def accumulated(
    function: Callable[[Any, Any], tuple[Tensor, Any]], count: int, dim: str = "batch"
) -> Callable[[Any, Any], tuple[tuple[Tensor, Any], Any]]:
    """Returns `value_and_grad(function, has_aux=True, zeros=False)`, computed in `count` parts.

        (loss, metrics), grads = accumulated(loss_and_metrics, 8)(params, batch)

    In layout rules the complete gradients have paths `gradients/params/...`.

    Values, metrics and gradients are the means over the parts, in float32 at least. Where the
    function returns means over its batch, they equal those of the complete batch; weights of
    examples are up to the function. A leaf that is a random key gives every microbatch its own key.
    Each microbatch gets all of the other leaves without the batch dim.

    Args:
        function: (params, batch) -> (value, metrics), all without dims.
        count: the number of parts of a batch.
        dim: the name of the batch dim.

    Raises:
        ValueError: when called: the batch cannot be split so; every reason is listed.
    """

    def differentiated(params: Any, batch: Any) -> tuple[tuple[Tensor, Any], Any]:
        check_microbatches(batch, count, dim)
        leaves, tree = jax.tree.flatten(batch)
        parts = {
            number: _in_parts(leaf, count, dim)
            for number, leaf in enumerate(leaves)
            if _is_key(leaf.shape) or leaf.shape.find(dim) is not None
        }

        lines: list[Source] = []
        reached: list[bool] = []  # whether each parameter has a gradient
        param_tree = jax.tree.structure(params)

        def add(sums: Any, slices: dict[int, Tensor]) -> tuple[Any, Any]:
            part = jax.tree.unflatten(tree, [slices.get(n, leaf) for n, leaf in enumerate(leaves)])
            results, grads = value_and_grad(function, has_aux=True, named=False, zeros=False)(
                params, part
            )
            reached.clear()
            jax.tree.map(lambda _, grad: reached.append(grad is not None), params, grads)
            lines[:] = [value.source for value in jax.tree.leaves(results)]
            sums = jax.tree.map(_added, sums, grads, is_leaf=_is_none)
            return sums, jax.tree.map(_widened, results)

        sums, results = ops.scan(add, jax.tree.map(_zeros, params), parts, MICROBATCH)
        values, tree_found = jax.tree.flatten(results)
        means = [_mean(value, line) for value, line in zip(values, lines, strict=True)]
        of = jax.tree.unflatten(param_tree, reached)
        grads = jax.tree_util.tree_map_with_path(finished, sums, of, is_leaf=_is_none)
        return jax.tree.unflatten(tree_found, means), grads

    def finished(keys: Any, total: Tensor | None, reached: bool) -> Tensor | None:
        if total is None or not reached:
            return None
        return name(total * (1.0 / count), path_of(keys, "gradients/params"))

    return differentiated


def check_microbatches(batch: Any, count: int, dim: str = "batch") -> None:
    """Raises one ValueError with every reason why a batch cannot be split into `count` parts.

        check_microbatches({"tokens": md.spec(md.dims(batch=16, length=128), "int32")}, 8)

    Args:
        batch: a tree of tensors, of arrays, or of `md.spec`.
    """
    if count < 1:
        raise ValueError(f"microbatches must be at least 1, got {count}")
    keyed = jax.tree_util.tree_flatten_with_path(batch, is_leaf=lambda x: hasattr(x, "dtype"))[0]
    shapes = {path_of(keys, "batch"): _shape(leaf) for keys, leaf in keyed}
    dtypes = {path_of(keys, "batch"): leaf.dtype for keys, leaf in keyed}
    sizes: dict[int, list[str]] = {}
    problems = []
    for path, shape in shapes.items():
        if (batch_dim := shape.find(dim)) is not None:
            sizes.setdefault(batch_dim.size, []).append(path)
            if shape.find(MICROBATCH) is not None:
                problems.append(f"{path}: {shape} has a dim `{MICROBATCH}` already; rename it")
        elif {KEY.name, RAW_KEY.name} & set(shape.names) and not _is_key(shape):
            problems.append(
                f"{path}: {shape} are keys that all microbatches would share; give one key, and "
                "split it in the loss"
            )
        elif shape.sizes == (2,) and dtypes[path] == "uint32" and not _is_key(shape):
            problems.append(
                f"{path}: u32{shape} looks like a raw key of JAX, which all microbatches would "
                f"share: call its dim `{RAW_KEY.name}`, or give it another dtype"
            )
    problems += [_misfit(size, paths, count, dim) for size, paths in sizes.items() if size % count]
    if not sizes:
        names = sorted({name for shape in shapes.values() for name in shape.names})
        listed = ", ".join(f"`{name}`" for name in names) or "none"
        problems.append(
            f"nothing in the batch has a dim `{dim}` to split; its dims: {listed}. "
            "batch_dim=... names another"
        )
    if problems:
        raise ValueError("\n  ".join([f"microbatches={count} do not fit the batch", *problems]))


def _misfit(size: int, paths: list[str], count: int, dim: str) -> str:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    near = [n for n in (_last(divisors, count), _first(divisors, count)) if n]
    below, above = size - size % count, size - size % count + count
    batches = " or ".join(str(n) for n in (below, above) if n)
    return (
        f"{', '.join(paths)}: {count} do not divide {dim}={size}; take "
        f"{' or '.join(map(str, near))} microbatches, or a batch of {batches}"
    )


def _last(divisors: list[int], count: int) -> int | None:
    return max((n for n in divisors if n < count), default=None)


def _first(divisors: list[int], count: int) -> int | None:
    return min((n for n in divisors if n > count), default=None)


def _in_parts(leaf: Tensor, count: int, dim: str) -> Tensor:
    """Returns a leaf with the dim `microbatch`: a part of its batch dim, or one for new keys."""
    microbatch = Dimension(MICROBATCH, count)
    batch_dim = leaf.shape.find(dim)
    if leaf.shape == Shape([RAW_KEY]):
        keys = split(leaf.rename({RAW_KEY.name: KEY.name}), microbatch)
        return keys.rename({KEY.name: RAW_KEY.name})
    if batch_dim is None:
        return split(leaf, microbatch)
    return ops.split(leaf, dim, [Dimension(dim, batch_dim.size // count), microbatch])


def _is_key(shape: Shape) -> bool:
    return shape in (Shape([KEY]), Shape([RAW_KEY]))


def _shape(leaf: Any) -> Shape:
    return leaf.dims if hasattr(leaf, "dims") else leaf.shape


def _zeros(param: Tensor) -> Tensor | None:
    """Returns the zeros to which a parameter's gradients are added; None if it has none."""
    dtype = param.dtype
    return ops.zeros(param.shape, accumulator(dtype)) if is_differentiable(dtype) else None


def _is_none(value: Any) -> bool:
    return value is None


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Returns a sum plus one more gradient, with the gradient's source line in the model.

    The sum stays partial, so that reports name this line for its reduction.
    """
    if total is None or grad is None:
        return total
    with located(_origin(grad, current().operations)):
        return total + ops.cast(grad, total.dtype)


def _origin(tensor: Tensor, operations: Sequence[Operation]) -> Source:
    """Returns the line that made a tensor, inside the loops it was stacked or carried by."""
    for op in reversed(operations):
        for number, output in enumerate(op.outputs):
            if output is tensor and op.bodies:
                return _origin(op.bodies[0].outputs[number], op.bodies[0].operations)
    return tensor.source


def _mean(value: Tensor, line: Source) -> Tensor:
    """Returns the mean over the microbatches, with the source line of its parts."""
    with located(line):
        return ops.mean(value, MICROBATCH)


def _widened(value: Tensor) -> Tensor:
    """Returns a value in a dtype with enough precision for its mean over the microbatches."""
    dtype = accumulator(value.dtype)
    return ops.cast(value, dtype if is_differentiable(dtype) else "float32")
