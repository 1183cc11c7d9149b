"""The programs of a run: its step for each size of batch, its evaluations, and its first state.

Guarantees:
    `Programs` traces all of them and checks them against the layout when it is made, before
    anything is allocated. The step of a batch size is compiled when it is first needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from meshdsl.layouts.layout import LayoutLike
from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.layouts.validate import LayoutWarning, ScopeWarning, check_scopes
from meshdsl.ops.random import KEY, key
from meshdsl.running.jit import Compiled, Jitted, jit
from meshdsl.running.runnable import with_hardware_at_hand
from meshdsl.tensors.dims import STEPS
from meshdsl.tensors.named_array import Spec, spec
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.data.rows import Rows, rows_read
from meshdsl.training.recipe import Recipe
from meshdsl.training.state import TrainState, spec_of

if TYPE_CHECKING:
    from meshdsl.running.jit import Options, SpmdProgram

Specs = Mapping[str, Spec]
Which = int | str | None  # the size of a step's batch, or the name of an evaluation
_PASSES = 3  # forward once and backward twice the products (Chowdhery et al. 2022, appendix B)


@dataclass(frozen=True)
class Place:
    """Where programs run: as in `md.jit`."""

    mesh: MeshLike | None
    layout: LayoutLike | None
    backend: str
    options: Options | None

    def jit(self, function: Any, donate: str = "", steps_per_call: int = 1) -> Jitted:
        """Returns the function for this place."""
        return jit(
            function,
            self.mesh,
            self.layout,
            self.backend,
            donate=donate or (),
            options=self.options,
            steps_per_call=steps_per_call,
        )

    def on_its_devices(self) -> Place:
        """Returns the place with the hardware of its TPUs, by whose time lowering decides."""
        return replace(self, options=with_hardware_at_hand(self.options, self.backend))


class _Checked(NamedTuple):
    """What decides whether a step is finite; the field names are the paths in messages."""

    loss: Tensor
    grad_norm: Tensor


class Programs:
    """The programs that a run executes.

    Args:
        batches: the specs of a step's batches, by batch size (None: there is one size).
        held_out: the specs of each evaluation's batches, by its name.

    Attributes:
        recipe, place: as given.
        state: dims and dtypes of the state.
        step: the step, for any size.

    Raises:
        ValueError: the layout or the mesh do not fit, or a function returns what it must not.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: Place,
        steps_per_call: int,
        batches: Mapping[int | None, Specs],
        held_out: Mapping[str, Specs],
    ) -> None:
        self.recipe, self.place = recipe, place
        self._fed: dict[Which, Specs] = {}
        self.state: TrainState = spec_of(recipe.create_state())
        self.step = place.jit(recipe.train_step(), "state", steps_per_call)
        evaluation = place.jit(recipe.eval_step())
        self._lowered: dict[Which, SpmdProgram] = {}
        self._compiled: dict[Which, Compiled] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScopeWarning)  # an error of its own, here
            for size, batch in batches.items():
                self._fed[size] = batch
                program = self.step.lower(self.state, batch)
                self._lowered[size] = program
                check_scopes(program.layout, program.mesh, program.scopes)
                warnings.simplefilter("ignore", LayoutWarning)  # the first step has warned
            for name, batch in held_out.items():
                self._fed[name] = batch
                self._lowered[name] = evaluation.lower(self.state.params, batch)

    @property
    def mesh(self) -> Mesh:
        return self.step.mesh

    def checked_step(self) -> Jitted:
        """Returns the loss and the norm of a step, with `check_finite`; nothing is donated.

        A run stops if one of these two is not finite. Other metrics may be infinite.
        """
        place, step = self.place, self.recipe.train_step()

        def checked_step(state: TrainState, batch: Any) -> _Checked:
            metrics = step(state, batch).metrics
            return _Checked(metrics["loss"], metrics["grad_norm"])

        return jit(
            checked_step,
            place.mesh,
            place.layout,
            place.backend,
            check_finite=True,
            options=place.options,
        )

    def compiled(self, which: Which) -> Compiled:
        """Returns the step for a size of batch, or the evaluation of a name."""
        if which not in self._compiled:
            self._compiled[which] = self._lowered[which].compile()
        return self._compiled[which]

    def rows(self, which: Which) -> Rows | None:
        """Returns the rows of a batch of `compiled` that this process reads; None: all of them."""
        if self.step.runtime.process_count() == 1:
            return None
        stored = getattr(self.compiled(which).executable, "inputs", None)
        if stored is None:
            return None
        batch = sorted(self._fed[which])  # the order of a dict's leaves; they are the last ones
        return rows_read(
            dict(zip(batch, stored[-len(batch) :], strict=True)), self.recipe.batch_dim
        )

    def places(self, size: int | None) -> list[Any]:
        """Returns the shardings of the state without pads, as a step takes it; see `places`."""
        return places(self.compiled(size), self.state)

    def first_state(self) -> TrainState:
        """Returns the state of the recipe's seed; every shard is made on its own device."""
        create = self.recipe.create_state()

        def create_state(key: Tensor) -> dict[str, TrainState]:
            return {"state": create(key)}  # the paths are then those of the step's state

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ScopeWarning)  # of gradients, say, which are not here
            creation = self.place.jit(create_state).lower(spec([KEY], "uint32")).compile()
        state: TrainState = creation(key(self.recipe.seed))["state"]
        return state

    def model_flops(self, size: int | None) -> int:
        """Returns the model's floating-point operations of a step, on all devices.

        These are three times those of the forward pass; recomputation does not count.
        """
        batch = {name: _of_one_step(one) for name, one in self._fed[size].items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forward = jit(self.recipe.eval_step(), backend="numpy")
            return _PASSES * forward.lower(self.state.params, batch).flops


def places(program: Compiled, argument: Any) -> list[Any]:
    """Returns the shardings of a program's first argument without pads.

    Those of backends without shardings are None.
    """
    count = len(jax.tree.leaves(argument, is_leaf=lambda leaf: isinstance(leaf, Spec)))
    stored = getattr(program.executable, "inputs", [None] * count)
    return [getattr(each, "even", None) for each in stored[:count]]


def _of_one_step(one: Spec) -> Spec:
    return spec(one.dims.without([STEPS]), one.dtype)
