"""The training loop: any init function, loss function and data, on any mesh.

Guarantees:
    The layout is checked against the training step before anything is allocated.
    A run that goes on from a checkpoint takes the same steps, to the same losses, as one that was
    never stopped. Where the run saves, Ctrl-C and SIGTERM lose nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from meshdsl.layouts.layout import Layout, LayoutLike
from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.running.automatic import opened
from meshdsl.tensors.dims import STEPS
from meshdsl.tensors.named_array import spec
from meshdsl.training.arguments import check_arguments
from meshdsl.training.checkpointing.checkpoints import Checkpoints, Restored
from meshdsl.training.checkpointing.grace import Grace
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.checkpointing.saving import begun as begun_in
from meshdsl.training.checkpointing.shared_disk import check_shared
from meshdsl.training.checkpointing.workdir import locked
from meshdsl.training.checks import (
    check_health,
    check_saves_together,
    check_steps_per_call,
    check_workdir,
)
from meshdsl.training.data.feeding import Data, Feed, Named
from meshdsl.training.evaluation import Evaluation
from meshdsl.training.health.hanging import HangWatch
from meshdsl.training.health.replicas import WITHOUT_REPLICAS, ReplicaCheck, replicated
from meshdsl.training.health.settings import Health
from meshdsl.training.health.stragglers import ALONE, StragglerWatch
from meshdsl.training.initial_state import Beginning, GivenWeights, checked_weights, first_of
from meshdsl.training.launching.job_time import job_time
from meshdsl.training.launching.rehearsing import rehearses
from meshdsl.training.nonfinite import FiniteCheck, RecentBatches, gradient_paths
from meshdsl.training.planned import keep, kept
from meshdsl.training.processes.watching import report
from meshdsl.training.programs import Place, Programs
from meshdsl.training.recipe import Recipe
from meshdsl.training.reporting.doing import doing
from meshdsl.training.reporting.meters import Meters
from meshdsl.training.reporting.metrics import MetricsWriter, Progress
from meshdsl.training.reporting.output import tell
from meshdsl.training.reporting.profiling import Profiler
from meshdsl.training.reporting.reports import Reporting
from meshdsl.training.reporting.time_shares import TimeShares
from meshdsl.training.run import Run, Sink
from meshdsl.training.state import TrainState
from meshdsl.training.stopping import Stopping, Stops
from meshdsl.training.trainable import Trainable, trained

if TYPE_CHECKING:
    from meshdsl.running.jit import Options


@dataclass(frozen=True)
class TrainResult:
    """The results of a run.

    Attributes:
        state: the final state.
        losses: the loss of every step that this run took.
        history: the metrics of every report.
        step: how many steps had been taken at the end, those of earlier runs included.
    """

    state: TrainState
    losses: list[float]
    history: list[dict[str, float]]
    step: int


def train(
    recipe: Recipe,
    data: Data | Iterable[Mapping[str, Any]],
    *,
    steps: int,
    mesh: MeshLike | None = None,
    layout: LayoutLike | None = None,
    backend: str = "jax",
    options: Options | None = None,
    steps_per_call: int = 1,
    workdir: str | os.PathLike[str] | None = None,
    evaluation: Evaluation | None = None,
    reporting: Reporting | None = None,
    saving: Saving | None = None,
    stops: Stops | None = None,
    health: Health | None = None,
    trainable: Trainable | None = None,
) -> TrainResult:
    """Trains a model for a number of steps, or goes on where an earlier run stopped.

        train(Recipe(init, loss, Sgd(0.1)), batches, steps=50, mesh="data:8", layout="batch:data")

    Args:
        recipe: the model, what it starts from, and what else a step is made of.
        data: dicts of NamedArrays; or `Data`, where batches have arrays without names, or grow.
        mesh, layout, backend, options: as in `md.jit`. The layout that `"auto"` stands for is
            printed, and kept in the workdir; a run that goes on has the same one.
        steps_per_call: how many steps the devices do without the host in between; numbers of steps
            are multiples of it.
        workdir: the folder for `metrics.jsonl` and TensorBoard; None writes nothing. Of several
            processes only the first writes, and shows progress.
        evaluation: held-out batches, and when they are gone through.
        reporting: how often metrics are reported, and what is recorded besides.
        saving: what is saved in the workdir, and when. A run whose workdir has a checkpoint goes
            on from there, with its state and at its place in the data.
        stops: what ends the run early, besides signals. Minutes are counted from this call.
        health: the faults of devices and processes that the run looks for.
        trainable: the parameters that are trained, instead of the recipe's `trainable`.

    Returns:
        The final state, and the metrics.

    Raises:
        ValueError: an argument is of another kind, the layout or the mesh do not fit, a batch
            differs from the first or has unnamed entries, the data ends early, a number is out of
            range, or a step was not finite and stops the run; another run has the workdir, or its
            checkpoint is of another job.
        KeyboardInterrupt: after Ctrl-C; the metrics up to there are written, and the state saved.
        Stopped: likewise, after SIGTERM.
        ReplicasDiffer: devices hold different replicas of the state, which is not saved.

    Examples:
        >>> from meshdsl.training import Recipe, Reporting, train
        >>> def init(key):
        ...     return {"mean": md.zeros([])}
        >>> def loss(params, batch):
        ...     return md.mean((batch["y"] - params["mean"]) ** 2)
        >>> batches = 2 * [{"y": md.named([1.0, 3.0], ["batch"])}]
        >>> recipe, quiet = Recipe(init, loss, md.optim.Sgd(0.5)), Reporting(quiet=True)
        >>> where = {"mesh": "data:2", "layout": "batch:data"}
        >>> result = train(recipe, batches, steps=2, reporting=quiet, **where)
        >>> print(result.losses, result.state.params["mean"])
        [5.0, 1.0] f32[] 2.
    """
    check_arguments(locals())
    recipe = recipe if trainable is None else replace(recipe, trainable=trainable)
    stopping, shares = Stopping(stops or Stops()), TimeShares()
    evaluation, reporting = evaluation or Evaluation(), reporting or Reporting()
    health = health or Health()
    check_workdir(workdir, reporting, saving, stopping.stops)
    check_steps_per_call(steps_per_call, steps, evaluation, reporting, saving, health)
    data = data if isinstance(data, Data) else Data(data)
    feed = Feed(data.batches, data.batch_dims, steps_per_call, data.batch_ramp, recipe.batch_dim)
    held_out = evaluation.named(data.batch_dims, recipe.batch_dim)
    specs = {name: batches.specs() for name, batches in held_out.items()}
    place = Place(mesh, layout, backend, options)
    place, asked = _completed(place, recipe, feed, workdir, reporting.quiet)
    with shares.spent("compiling"), doing("planning the step", reporting.quiet):
        programs = Programs(recipe, place.on_its_devices(), steps_per_call, feed.specs(), specs)
    first = programs.step.runtime.process_index() == 0
    if asked is not None and first and not rehearses():
        if not reporting.quiet:
            tell(f"layout {place.layout} on mesh {place.mesh}")
        if workdir is not None:
            keep(workdir, asked, {"mesh": str(place.mesh), "layout": str(place.layout)})
    check_saves_together(programs.step.runtime.process_count(), saving)
    check_health(health, backend)
    if reporting.profile is not None and programs.step.runtime.profile is None:
        raise ValueError(f"backend {backend} has no devices to profile; take another")
    return _Prepared(
        steps,
        steps_per_call,
        workdir,
        evaluation,
        reporting,
        saving,
        stopping,
        health,
        feed,
        held_out,
        programs,
        shares,
    ).run()


def _completed(
    place: Place,
    recipe: Recipe,
    feed: Feed,
    workdir: str | os.PathLike[str] | None,
    quiet: bool,
) -> tuple[Place, dict[str, str] | None]:
    """Returns a place with a complete mesh and layout, and what a search for them is given.

    They are those of an earlier start of the run; else a search chooses them for the largest batch.
    The second is None if the place was complete.
    """
    left = opened(place.mesh, place.layout, place.backend)
    if left is None:
        return place, None
    asked = {"mesh": str(left.devices), "rules": str(left.rules), "hardware": left.hardware}
    before = kept(workdir)
    if before is not None and before[0] == asked:
        mesh, layout = Mesh.parse(before[1]["mesh"]), Layout.parse(before[1]["layout"])
    else:
        *_, largest = feed.specs().values()
        batch = {name: spec(one.dims.without([STEPS]), one.dtype) for name, one in largest.items()}
        with doing("searching for a mesh and a layout", quiet):
            mesh, layout = left.completed_for(recipe, batch, place.options)
    return replace(place, mesh=mesh if left.mesh is None else place.mesh, layout=layout), asked


@dataclass(frozen=True)
class _Prepared:
    """A run that has been checked, before anything is allocated or written."""

    steps: int
    steps_per_call: int
    workdir: str | os.PathLike[str] | None
    evaluation: Evaluation
    reporting: Reporting
    saving: Saving | None
    stopping: Stopping
    health: Health
    feed: Feed
    held_out: Mapping[str, Named]
    programs: Programs
    shares: TimeShares

    def run(self) -> TrainResult:
        """Takes the steps; raises as `train`."""
        if rehearses():
            return self._rehearsed()
        weights = self._weights()
        with ExitStack() as stack:
            signals = stack.enter_context(ExitStack())  # they are listened to until all is saved
            if self._first and self.workdir is not None:
                stack.enter_context(locked(self.workdir))
            stack.callback(self.feed.close)
            quiet = self.reporting.quiet or not self._first
            with self.shares.spent("compiling"), doing("compiling the step", quiet):
                for which in (self.feed.full, *self.held_out):
                    self.programs.compiled(which)
            checkpoints, restored = self._restored(stack)
            beginning = first_of(restored, weights, self.programs, self.feed, self.steps_per_call)
            self.feed.rows = self.programs.rows
            self._tell_start(restored, weights)
            run = self._begun(stack, beginning, checkpoints)
            if self._first and self.health.replica_check_every and not replicated(run.state):
                warnings.warn(WITHOUT_REPLICAS, stacklevel=3)
            if self.health.straggler_factor is not None and jax.device_count() == 1:
                warnings.warn(ALONE, stacklevel=3)
            signals.enter_context(self.stopping.listening(run.grace.begin))
            signals.callback(run.grace.end)
            with run.watch:
                run.run()
            spent = str(self.shares)  # without the rest of the last checkpoint's writing
            if run.job_time is not None:
                over_all = run.job_time.report(run.done, run.step_seconds())
                spent = "\n".join(filter(None, [spent, over_all]))
        if self._first and not self.reporting.quiet:
            tell(spent)
        if run.interrupted:
            self.stopping.check(run.done, self.steps)
        return TrainResult(run.state, run.losses, run.history, run.done)

    def _rehearsed(self) -> TrainResult:
        """Compiles the programs, and takes no step."""
        self.feed.close()
        for which in (self.feed.full, *self.held_out):
            self.programs.compiled(which)
        return TrainResult(self.programs.state, [], [], 0)

    @property
    def recipe(self) -> Recipe:
        return self.programs.recipe

    @property
    def _first(self) -> bool:
        return bool(self.programs.step.runtime.process_index() == 0)

    def _weights(self) -> GivenWeights | None:
        """Returns the weights to start from, if the run does not go on from a checkpoint."""
        recipe, workdir = self.recipe, self.workdir
        if recipe.init_from is None or (self.saving and workdir and begun_in(workdir)):
            return None
        return checked_weights(recipe.init_from, self.programs.state.params, recipe.trainable)

    def _restored(self, stack: ExitStack) -> tuple[Checkpoints | None, Restored | None]:
        """Returns the run's checkpoints, and the one that it goes on from; each may be None."""
        if self.saving is None or self.workdir is None:
            return None, None
        check_shared(self.workdir)
        self.feed.position()  # which has to be something to store
        checkpoints = stack.enter_context(self.saving.open(self.workdir))
        places = self.programs.places(self.feed.full)
        return checkpoints, self.saving.find(checkpoints, self.programs.state, places)

    def _tell_start(self, restored: Restored | None, weights: GivenWeights | None) -> None:
        """Prints what the run starts from, unless it starts from `init`."""
        if not self._first or self.reporting.quiet:
            return
        if restored is not None:
            weight_files = self.recipe.init_from
            unused = "" if weight_files is None else f", and not from the weights {weight_files}"
            source = restored.source or str(restored.folder)
            tell(f"going on from step {restored.step:,}, {source}{unused}")
        if weights is not None:
            tell(str(weights))

    def _begun(
        self, stack: ExitStack, beginning: Beginning, checkpoints: Checkpoints | None
    ) -> Run:
        """Returns the run before its first step; the stack closes what this opens."""
        programs, runtime, reporting = self.programs, self.programs.step.runtime, self.reporting
        sinks = self._sinks(stack, beginning)
        held_out = {
            name: stack.enter_context(batches.reading(programs.rows(name)))
            for name, batches in self.held_out.items()
        }
        learning = trained(programs.state.params, self.recipe.trainable)
        flops = programs.model_flops(self.feed.full)
        return Run(
            programs=programs,
            state=beginning.state,
            feed=self.feed,
            held_out=held_out,
            begun=beginning.step,
            evaluated=beginning.evaluated or not held_out,
            reported=beginning.reports,
            steps=self.steps,
            at_once=self.steps_per_call,
            log_every=reporting.log_every,
            eval_every=self.evaluation.eval_every or self.steps,
            meters=Meters(reporting.tokens_per_batch, flops, programs.mesh.size, runtime),
            finite_check=FiniteCheck(self.recipe.nonfinite == "stop", gradient_paths(learning)),
            replica_check=ReplicaCheck(self.health.replica_check_every),
            stragglers=StragglerWatch(
                self.health.straggler_factor,
                self.health.straggler_steps,
                self.shares,
                says=report if self._first else None,
            ),
            watch=HangWatch(self.health.step_timeout, runtime.process_index()),
            stopping=self.stopping,
            grace=Grace(self.stopping.stops.grace, self.workdir),
            profiler=stack.enter_context(Profiler(reporting.profile, runtime, self.workdir)),
            saving=self.saving,
            checkpoints=checkpoints,
            sinks=sinks,
            shares=self.shares,
            recent=RecentBatches(),
            job_time=job_time(self.workdir) if self._first else None,
        )

    def _sinks(self, stack: ExitStack, beginning: Beginning) -> list[Sink]:
        """Returns the functions that get each report's metrics; only process 0 has any."""
        if not self._first:
            return []
        sinks: list[Sink] = []
        progress = None
        if not self.reporting.quiet:
            progress = stack.enter_context(Progress(self.steps))
        if self.workdir is not None:
            settings = self.reporting.settings
            writer = MetricsWriter(self.workdir, beginning.step, beginning.reports, settings)
            sinks.append(stack.enter_context(writer).write)
        if progress is not None:
            sinks.append(progress.log)
        if self.saving is not None and self.saving.data is not None:
            sinks.append(stack.enter_context(self.saving.data.reading()))
        return sinks
