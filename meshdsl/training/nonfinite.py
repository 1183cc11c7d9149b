"""Gradients that are not finite: which parameters have them, by one small all_reduce.

Each gradient's squared norm is one element of a vector. The devices add up this one vector,
whatever the layouts of the parameters. Clipping needs its sum in any case. The elements that are
not finite name the parameters. A gradient whose square overflows counts as not finite.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.dtypes import accumulator, is_differentiable
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor

_GRADIENTS = "gradients"
_OF_BATCH = "it comes from the input batch/"  # in an origin
_KEPT_BYTES = 64 * 2**20  # of batches: on each device, or in the memory of the host
_FOR_GROWTH = "; if the loss grew before, a lower learning rate or clip_norm may keep it small"
_FOR_GRADIENTS = "; a lower learning rate or clip_norm may keep them from happening"
_BY_HAND = "md.jit(recipe.train_step(), check_finite=True) names the operation"


def squared_norms(grads: Any, params: Any = None) -> Tensor:
    """Returns the sum of the squares of each gradient: [gradients], float32 at least.

    They are in the order of `gradient_paths` of the parameters, zero where a gradient is None.

    Args:
        params: the parameters whose gradients count; by default all that have one.
    """
    rows: list[tuple[Tensor | None, Tensor]] = []
    like = grads if params is None else params
    jax.tree.map(lambda param, grad: rows.append((grad, param)), like, grads)
    leaves = [
        None if grad is None else ops.cast(grad, accumulator(grad.dtype))
        for grad, param in rows
        if is_differentiable(param.dtype)
    ]
    dtypes = (leaf.dtype for leaf in leaves if leaf is not None)
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default="float32")
    total = ops.zeros([Dimension(_GRADIENTS, max(len(leaves), 1))], widest)
    for place, leaf in enumerate(leaves):
        if leaf is None:
            continue
        norm = ops.cast(ops.sum(ops.square(leaf)), widest)
        alone = ops.broadcast(norm, [Dimension(_GRADIENTS, 1)])
        total = total + ops.pad(alone, _GRADIENTS, place, len(leaves) - 1 - place)
    return total


def first_nonfinite(squares: Tensor, finite: Tensor) -> Tensor:
    """Returns the number of the first gradient that is not finite, int32 without dims.

    It is -1 if the step is finite. It is the count of gradients if each is finite and their sum, or
    the loss, is not.
    """
    (gradients,) = squares.shape
    places = ops.where(ops.isfinite(squares), gradients.size, ops.arange(gradients))
    return ops.where(finite, -1, ops.min(places))


def gradient_paths(params: Any) -> list[str]:
    """Returns the paths of the parameters that have gradients, in the order of their tree.

    Args:
        params: a tree of tensors, of arrays, or of `md.spec`.
    """
    keyed = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: hasattr(x, "dtype"))[0]
    return [path_of(keys) for keys, leaf in keyed if is_differentiable(leaf.dtype)]


class NotFinite(ValueError):
    """A loss or a gradient is not finite, and ends the run.

    Attributes:
        step: the number of the step.

    Examples:
        >>> from meshdsl.training import NotFinite
        >>> NotFinite(7, "loss is nan in step 7").step
        7
    """

    def __init__(self, step: int, message: str, advice: str = "") -> None:
        super().__init__(f"{message}{advice}. {_BY_HAND}")
        self.step = step
        self.message, self.advice = message, advice

    def explained(self, origin: str) -> NotFinite:
        """Returns the error with what made the first value that is not finite, and its line."""
        result = NotFinite(self.step, self.message, self.advice)
        advice = "" if _OF_BATCH in origin else self.advice  # no update changes the data
        repeated = f"The step was repeated with every operation checked:\n{origin}"
        result.args = (f"{self.message}{advice}. {repeated}",)
        return result


class RecentBatches:
    """The batches of the last steps, as many as fit into a little memory.

    A step that was not finite is repeated on its batch, to find the operation that made it.

    Args:
        limit: the bytes that they may take, of each device or of the host.
    """

    def __init__(self, limit: int = _KEPT_BYTES) -> None:
        self._kept: deque[tuple[int, int, Mapping[str, Any]]] = deque()
        self._bytes, self._limit = 0, limit

    def keep(self, step: int, batch: Mapping[str, Any]) -> None:
        """Keeps the batch of a step; the oldest ones make room."""
        size = sum(_bytes_on_each(array.data) for array in batch.values())
        self._kept.append((step, size, batch))
        self._bytes += size
        while self._bytes > self._limit:
            self._bytes -= self._kept.popleft()[1]

    def clear(self) -> None:
        """Drops all batches."""
        self._kept.clear()
        self._bytes = 0

    def of(self, step: int) -> Mapping[str, Any] | None:
        """Returns the batch of a step; None if it is not kept."""
        return next((batch for number, _, batch in self._kept if number == step), None)


def _bytes_on_each(data: Any) -> int:
    """Returns the bytes of an array on one device; of an array of the host, all of them."""
    if not isinstance(data, jax.Array):
        return int(data.nbytes)
    parts = data.addressable_shards
    return sum(part.data.nbytes for part in parts) // max(len(parts), 1)


def origin_of(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> str | None:
    """Returns which operation first makes a value that is not finite in a step, and its line.

    None if the step is finite now, or cannot be repeated, as where memory does not suffice.

    Args:
        step: the step, with `check_finite`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first step has warned
            step(state, batch)
    except FloatingPointError as error:
        return str(error)
    except Exception:  # the run ends with the error that it has
        return None
    return None


@dataclass(frozen=True)
class FiniteCheck:
    """Stops a run, or warns, after steps that were not finite; these have changed nothing.

    Attributes:
        stops: whether the first such step ends the run; else each one gives a warning.
        paths: those of `gradient_paths`.
    """

    stops: bool
    paths: Sequence[str]

    def look(self, begins: int, losses: Sequence[float], firsts: Sequence[float]) -> None:
        """Looks at the losses and the metric `first_nonfinite` of steps from `begins` on.

        Raises:
            NotFinite: a step was not finite, and `stops` is set.
        """
        for step, (loss, first) in enumerate(zip(losses, firsts, strict=True), begins):
            if first < 0:
                continue
            message = f"step {step}: the loss is {loss:.6g}, and {culprit(int(first), self.paths)}"
            if self.stops:
                # Clipping and the learning rate act on gradients. Where the forward pass makes the
                # value, they help only if earlier updates made the parameters too large.
                growth = _FOR_GROWTH if step > 1 else ""
                advice = _FOR_GRADIENTS if math.isfinite(loss) else growth
                raise NotFinite(
                    step,
                    f"{message}. The update was left out. nonfinite=skip goes on without such "
                    "steps",
                    advice,
                )
            warnings.warn(f"{message}; the step is skipped", stacklevel=2)


def culprit(first: int, paths: Sequence[str]) -> str:
    """Returns in words what was not finite in a step.

    Args:
        first: the metric `first_nonfinite`, at least 0.
        paths: those of `gradient_paths`.
    """
    if first < len(paths):
        return f"the gradient of {paths[first]} is not finite"
    return "the loss, or the norm of all gradients together, is not finite"
