"""TrainState: everything a training run carries from step to step, as one tree.

Its paths are `state/step`, `state/params/...` and `state/optimizer/...`, so a layout can tell the
optimizer's tensors from the parameters they mirror (`optimizer/embed:data`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.array import NamedArray, spec
from meshdsl.graph import Tensor
from meshdsl.jit import jit
from meshdsl.module import Module
from meshdsl.ops.random import KEY
from meshdsl.optim.optimizer import Optimizer
from meshdsl.policy import Policy


class TrainState(Module):
    """The number of steps taken (int32, no dims), the parameters and the optimizer's state."""

    step: Any
    params: Any
    optimizer: Any


def create(
    init: Callable[[Tensor], Any], optimizer: Optimizer, policy: Policy | None = None
) -> Callable[[Tensor], TrainState]:
    """Returns a function from a key to the state to start from, to be traced.

    Under `md.jit(create(...), mesh, layout)` every shard is made on its own device.

    Args:
        init: from a key to the parameters.
        policy: if given, the parameters take its dtype.
    """

    def create_state(key: Tensor) -> TrainState:
        params = init(key)
        if policy is not None:
            params = policy.to_params(params)
        return TrainState(ops.zeros([], "int32"), params, optimizer.init(params))

    return create_state


def spec_of(create: Callable[[Tensor], Any]) -> Any:
    """Returns what `create` would return as a tree of `md.spec`; nothing is computed."""
    structure = None

    def observed(key: Tensor) -> Any:
        nonlocal structure
        result = create(key)
        structure = jax.tree.structure(result, is_leaf=lambda x: isinstance(x, NamedArray))
        return result

    graph = jit(observed).trace(spec([KEY], "uint32"))
    assert structure is not None
    return jax.tree.unflatten(structure, [spec(t.shape, t.dtype) for t in graph.outputs])
