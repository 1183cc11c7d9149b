"""Looking into a running program: printing tensors, and checking that they are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshdsl.ops.control.body import is_array
from meshdsl.ops.creation import as_tensor
from meshdsl.ops.elementwise.arithmetic import abs, cast, isinf, isnan, sqrt, square
from meshdsl.ops.operation import at_once, operation, reported_as
from meshdsl.ops.reductions.reduction import max, mean, min, sum
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import is_complex, is_differentiable, is_float, short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Operation, Primitive, Work
from meshdsl.tracing.trace import bind, bind_one

WHOLE = 1000  # the most elements that are printed one by one


@operation
def print(*values: Any) -> None:
    """Prints tensors while the program runs: global values, once, in order, on every layout.

        md.print("loss", loss)
        md.print("step {}: loss {}", step, loss)

    It may stand anywhere: in loops, branches and functions that are differentiated (where it prints
    in the forward pass). What is not scalar has its dims before it; of more than 1000 elements the
    mean, standard deviation, minimum and maximum are printed. A tensor to be printed whole is
    gathered from the devices. A call of a program that prints returns when all is printed. Layers
    that form a pipeline, and microbatches that go through it, cannot print: lowering says so.

    Args:
        values: tensors and texts, with spaces between them; or first a text with a `{}` for every
            other value.

    Raises:
        ValueError: not as many values as there are `{}`.

    Examples:
        >>> @md.jit
        ... def total(x):
        ...     md.print("x {} has the sum {}", x, md.sum(x))
        ...     return x
        >>> y = total(md.named([1.0, 2.0], ["embed"]))
        x f32[embed=2] [1. 2.] has the sum 3
    """
    template, rest = "", list(values)
    if rest and isinstance(rest[0], str) and "{}" in rest[0]:
        template, rest = rest[0], rest[1:]
        if template.count("{}") != len(rest):
            count = template.count("{}")
            raise ValueError(f"the text has {count} `{{}}`, but {len(rest)} values follow it")
    else:
        template = " ".join("{}" for _ in rest)
    shown: list[str | Shown] = []
    operands: list[Tensor] = []
    for value in rest:
        if isinstance(value, str):
            shown.append(value)
            continue
        tensor = as_tensor(value)
        parts = [tensor] if tensor.shape.volume <= WHOLE else _figures(tensor)
        shown.append(Shown(tensor.shape, tensor.dtype, len(parts)))
        operands += parts
    bind(PRINT, operands, {"message": Message(template, tuple(shown))})


def _figures(x: Tensor) -> list[Tensor]:
    """Returns mean, deviation, minimum and maximum of a tensor with too many elements to print."""
    if is_complex(x.dtype):
        x = abs(x)
    elif not is_float(x.dtype):
        x = cast(x, "float32")
    average = mean(x)
    return [average, sqrt(mean(square(x - average))), min(x), max(x)]


@dataclass(frozen=True)
class Shown:
    """How one tensor is printed: from itself, or from figures about it."""

    shape: Shape
    dtype: np.dtype
    operands: int

    def text(self, arrays: Sequence[np.ndarray]) -> str:
        head = f"{short(self.dtype)}{self.shape}"
        if self.operands > 1:
            names = ("mean", "deviation", "min", "max")
            pairs = zip(names, arrays, strict=True)
            return f"{head} " + ", ".join(f"{name} {_number(a)}" for name, a in pairs)
        (array,) = arrays
        if not self.shape:
            return _number(array)
        break_ = "\n" if len(self.shape) > 1 else " "
        return f"{head}{break_}{np.array2string(_readable(array), threshold=WHOLE + 1)}"


@dataclass(frozen=True)
class Message:
    """What is printed: a text with a `{}` for each of `shown`."""

    template: str
    shown: tuple[str | Shown, ...]

    def text(self, arrays: Sequence[np.ndarray]) -> str:
        """Returns the message about global values."""
        left = list(arrays)
        words = []
        for one in self.shown:
            if isinstance(one, Shown):
                words.append(one.text(left[: one.operands]))
                left = left[one.operands :]
            else:
                words.append(one)
        parts = self.template.split("{}")
        return parts[0] + "".join(w + after for w, after in zip(words, parts[1:], strict=True))

    def __str__(self) -> str:
        words = [one if isinstance(one, str) else "…" for one in self.shown]
        return repr(self.template.replace("{}", "%s") % tuple(words))


def _readable(array: Any) -> np.ndarray:
    array = np.asarray(array)
    known = array.dtype.kind in "biufc"
    return array if known else array.astype(np.float32)


def _number(array: Any) -> str:
    value = _readable(array).item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@at_once
def check_finite(tree: Any) -> Any:
    """Returns a tree of tensors as it is; a call of the program fails if one is not finite.

        h = md.check_finite(h)
        gradients = md.check_finite(gradients)

    Where a value has a NaN or an infinity, the call raises a FloatingPointError which names the
    operation that made the first one of it, with its line, its operands and the steps of the loops
    around it. In the backward pass the value's gradient is checked too. What no device's shard has
    as data (pads) does not count.

    It costs a count of what is not finite, one small all_reduce for all counts of a program, and
    that a call waits for them. To find the operation, the program runs once more with every value
    checked. `f.as_jax` knows of no checks. See also `md.jit(..., check_finite=True)`.

    Raises:
        FloatingPointError: when the program runs: see above.

    Examples:
        >>> inverse = md.jit(lambda x: md.check_finite(1.0 / x))
        >>> print(inverse(md.named([2.0, 4.0], ["batch"])))
        f32[batch=2] [0.5  0.25]
        >>> inverse(md.named([0.0, 4.0], ["batch"]))
        Traceback (most recent call last):
        FloatingPointError: check_finite: f32[batch=2] is not finite
          at ...
          first made by divide, of finite operands: 1 infinite of 2 values in f32[batch=2]
          ...
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_array)
    with reported_as("check_finite"):
        tensors = [as_tensor(leaf) for leaf in leaves]
    return jax.tree.unflatten(
        structure,
        [bind_one(CHECK, (t,)) if is_differentiable(t.dtype) else t for t in tensors],
    )


def _check_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    return [bind_one(op.primitive, (cotangents[0],))]


def _check_tangent(
    op: Operation, arguments: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    return [bind_one(op.primitive, arguments)], [bind_one(op.primitive, tangents)]


PRINT = Primitive("print", lambda inputs, params: [(Shape(), np.dtype("int32"))], effect=True)
CHECK = Primitive(
    "check_finite",
    lambda inputs, params: [(inputs[0].shape, inputs[0].dtype)],
    _check_gradient,
    push=_check_tangent,
    work=Work.NONE,
    form=Form.SAME,
    mark=True,
    effect=True,
)


def counts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many NaN and how many infinities a floating-point tensor has."""
    return sum(cast(isnan(x), "int32")), sum(cast(isinf(x), "int32"))
