"""TrainState: everything a training run carries from step to step, as one tree.

Its paths are `state/step`, `state/params/...` and `state/optimizer/...`. So layouts can have rules
for the optimizer alone, whose tensors mirror parameters (`optimizer/embed:data`). Parts that a run
does not use are None, and so no leaves: `state/skipped`, and `state/scaling/...`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.ops.literal import as_traced
from meshdsl.ops.random import KEY
from meshdsl.optim.from_optax import Transformation, as_optimizer
from meshdsl.optim.optimizer import Optimizer
from meshdsl.running.jit import jit
from meshdsl.tensors.module import Module, path_of
from meshdsl.tensors.named_array import NamedArray, Spec, spec
from meshdsl.tensors.policy import Policy
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.loss_scaling import LossScaling, ScalingState
from meshdsl.training.trainable import Trainable, trained


class TrainState(Module):
    """Everything that a step takes and returns.

    Attributes:
        step: the number of batches seen; int32, no dims.
        params: the parameters.
        optimizer: the optimizer's state.
        skipped: how many of these batches changed nothing, because the loss or gradients were not
            finite; int32, no dims. None: steps are not checked.
        scaling: the loss scale. None: the loss is not scaled.
    """

    step: Any
    params: Any
    optimizer: Any
    skipped: Any = None
    scaling: ScalingState | None = None

    @property
    def updates(self) -> Any:
        """The number of updates so far, which the optimizer and its schedule count by."""
        return self.step if self.skipped is None else self.step - self.skipped


def create(
    init: Callable[[Tensor], Any],
    optimizer: Optimizer | Transformation,
    policy: Policy | str | None = None,
    skip_nonfinite: bool = False,
    loss_scaling: LossScaling | None = None,
    trainable: Trainable | None = None,
) -> Callable[[Tensor], TrainState]:
    """Returns a function from a key to the state to start from, to be traced.

    Under `md.jit(create(...), mesh, layout)` every shard is made on its own device.

    Args:
        init: from a key to the parameters; NamedArrays in them become constants of the program.
        policy: if given, the parameters take its dtype.
        skip_nonfinite, loss_scaling: as in `make_train_step`, which needs the leaves they add.
        trainable: as in `make_train_step`; the optimizer has state for these parameters alone.
    """

    policy = Policy.of(policy)

    def create_state(key: Tensor) -> TrainState:
        params = as_traced(init(key))
        if policy is not None:
            params = policy.to_params(params)
        return TrainState(
            step=ops.zeros([], "int32"),
            params=params,
            optimizer=as_optimizer(optimizer).init(trained(params, trainable)),
            skipped=ops.zeros([], "int32") if skip_nonfinite or loss_scaling else None,
            scaling=None if loss_scaling is None else loss_scaling.init(),
        )

    return create_state


def spec_of(create: Callable[[Tensor], Any]) -> Any:
    """Returns what `create` would return as a tree of `md.spec`; nothing is computed.

    `spec_of(model.init)` has the dims and dtypes of the parameters: for `load_weights`, `f.lower`
    and `md.show`.

    Args:
        create: traced; from a random key to a tree of tensors.

    Examples:
        >>> from meshdsl.training import spec_of
        >>> def init(key):
        ...     return {"w": md.random.normal(key, md.dims(embed=4, d_ff=8))}
        >>> spec_of(init)
        {'w': f32[embed=4, d_ff=8]}
    """
    structure = None

    def observed(key: Tensor) -> Any:
        nonlocal structure
        result = create(key)
        structure = jax.tree.structure(result, is_leaf=lambda x: isinstance(x, NamedArray))
        return result

    graph = jit(observed).trace(spec([KEY], "uint32"))
    assert structure is not None
    return jax.tree.unflatten(structure, [spec(t.shape, t.dtype) for t in graph.outputs])


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the arrays or specs of a tree by their paths."""
    keyed = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]
    return {path_of(keys): leaf for keys, leaf in keyed}


def tree_like(like: Any, leaves: Sequence[Any]) -> Any:
    """Returns a tree of other arrays, in the order of `by_path`."""
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=_is_leaf), leaves)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, NamedArray | Spec)
