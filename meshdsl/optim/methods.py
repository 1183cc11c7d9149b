"""The methods of optimizers, `init` and `update`: inside of a trace and outside of one.

Outside they run at once, as one program per method. Invariant: a method gets traced tensors in
trees that fit each other, and the step as a tensor without dims. Each parameter and its state keep
the layout of that parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from meshdsl.ops.operation import of_trees
from meshdsl.optim.checks import as_step, need_alike, need_tensors
from meshdsl.optim.optimizer import Mirror, lies_like, updated_like
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor

C = TypeVar("C", bound=Callable[..., Any])


def init_method(method: C) -> C:
    """Marks an optimizer's `init`; see the module's docstring."""

    def prepare(self: Any, params: Any) -> tuple[Any, Any]:
        need_tensors("params", params)
        return self, params

    def like(args: Sequence[Any], state: Any) -> list[Any]:
        return lies_like(args[1], None, state)

    return of_trees(prepare, like)(method)  # type: ignore[return-value]


def update_method(kind: type | None, own: Sequence[str] = ()) -> Callable[[C], C]:
    """Marks an optimizer's `update`; see the module's docstring.

    Args:
        kind: what its `init` returns, to know states of other optimizers; None: any state, which
            is not looked into.
        own: the fields of the state that are this optimizer's own; by default, all of them. The
            state of an optimizer inside is that one's to check.
    """

    def prepare(
        self: Any, grads: Any, state: Any, params: Any, step: Any
    ) -> tuple[Any, Any, Any, Any, Tensor]:
        need_tensors("params", params)
        need_alike(params, "grads", grads)
        parts = state if kind is not None else None
        if kind is not None and not isinstance(state, kind):
            raise ValueError(
                f"state is {type(state).__name__}, not {kind.__name__}: give what `init` or the "
                "`update` before returned"
            )
        keyed, _ = jax.tree_util.tree_flatten_with_path(parts, is_leaf=_is_mirror)
        for keys, mirror in keyed:
            path = path_of(keys)
            if _is_mirror(mirror) and (not own or path.split("/")[0] in own):
                need_alike(params, f"state/{path}/params", mirror.params)
        step = as_step(step)
        if step.dims:
            raise ValueError(f"step is the number of one step, without dims, not {step.dims}")
        return self, grads, state, params, step

    def like(args: Sequence[Any], result: tuple[Any, Any]) -> list[Any]:
        _, _, state, params, _ = args
        return updated_like(params, state, result)

    def mark(method: C) -> C:
        return of_trees(prepare, like)(method)  # type: ignore[return-value]

    return mark


def _is_mirror(value: Any) -> bool:
    return isinstance(value, Mirror)
