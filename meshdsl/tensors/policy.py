"""Policy: the dtypes of a mixed-precision computation, kept out of the models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from meshdsl.ops.elementwise.arithmetic import cast
from meshdsl.tensors.dtypes import as_dtype, is_float
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tracing.graph import TracedTensor


@dataclass(frozen=True)
class Policy:
    """Dtypes of parameters at rest, of computation, and of results.

    `Policy.parse("params=float32,compute=bfloat16,output=float32")` or a single dtype for all.

    Raises:
        ValueError: a dtype is unknown, or not floating-point.

    Examples:
        >>> policy = md.Policy.parse("params=float32,compute=bfloat16")
        >>> policy.params.name, policy.compute.name, policy.output.name
        ('float32', 'bfloat16', 'float32')
        >>> x = md.jit(policy.to_compute)(md.ones([md.Dimension("embed", 4)]))
        >>> print(x)
        bf16[embed=4] [1 1 1 1]
    """

    params: Any = "float32"
    compute: Any = "float32"
    output: Any = "float32"

    def __post_init__(self) -> None:
        for name in ("params", "compute", "output"):
            dtype = as_dtype(getattr(self, name))
            if not is_float(dtype):
                raise ValueError(f"policy {name}={dtype.name}: needs a floating-point dtype")
            object.__setattr__(self, name, dtype)

    @staticmethod
    def parse(text: str) -> Policy:
        """Reads `float32` or `params=float32,compute=bfloat16,output=float32`.

        Raises:
            ValueError: an unknown key or dtype.
        """
        if "=" not in text:
            return Policy(text, text, text)
        pairs = dict(part.partition("=")[::2] for part in text.split(","))
        unknown = sorted(set(pairs) - {"params", "compute", "output"})
        if unknown:
            raise ValueError(
                f"unknown policy key {', '.join(unknown)}; the keys are params, compute, output"
            )
        return Policy(**pairs)

    @staticmethod
    def of(policy: Policy | str | None) -> Policy | None:
        """Returns a policy, or the one that a text describes: `Policy.of("bfloat16")`; None for
        None.

        Raises:
            ValueError: it is something else, or malformed.
        """
        if isinstance(policy, str):
            return Policy.parse(policy)
        if policy is None or isinstance(policy, Policy):
            return policy
        raise ValueError(
            'a policy is given as "params=float32,compute=bfloat16" or as a md.Policy, not as '
            f"{type(policy).__name__}: {policy!r}"
        )

    def to_params(self, tree: Any) -> Any:
        return _cast_floats(tree, self.params)

    def to_compute(self, tree: Any) -> Any:
        return _cast_floats(tree, self.compute)

    def to_output(self, tree: Any) -> Any:
        return _cast_floats(tree, self.output)


def _cast_floats(tree: Any, dtype: Any) -> Any:
    def convert(leaf: Any) -> Any:
        traced = isinstance(leaf, TracedTensor)
        return cast(leaf, dtype) if traced and is_float(leaf.dtype) else leaf

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, NamedArray))
