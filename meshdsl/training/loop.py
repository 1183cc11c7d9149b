"""The training loop: any init function, loss function and data, on any mesh.

Guarantees:
    The layout is checked against the training step before anything is allocated.
    A run that goes on from a checkpoint takes the same steps, to the same losses, as one that was
    never stopped. Where the run saves, Ctrl-C and SIGTERM lose nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshdsl.layouts.layout import LayoutLike
from meshdsl.layouts.mesh import MeshLike
from meshdsl.optim.from_optax import Transformation
from meshdsl.optim.optimizer import Optimizer
from meshdsl.tensors.dims import DimsLike
from meshdsl.tensors.policy import Policy
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.arguments import check_arguments
from meshdsl.training.batch_ramp import BatchRamp
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.checkpointing.saving import begun as begun_in
from meshdsl.training.checkpointing.workdir import held
from meshdsl.training.checks import check_numbers, check_saves_together
from meshdsl.training.data.feeding import Feed, Named, iterator
from meshdsl.training.initial_state import Beginning, checked_weights, going_on, state_of_weights
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.nonfinite import FiniteCheck, gradient_paths
from meshdsl.training.programs import Place, Programs
from meshdsl.training.recipe import Recipe
from meshdsl.training.reporting.meters import Meters
from meshdsl.training.reporting.metrics import MetricsWriter, Progress
from meshdsl.training.reporting.output import tell
from meshdsl.training.reporting.profiling import ProfiledSteps, Profiler
from meshdsl.training.run import Run
from meshdsl.training.state import TrainState
from meshdsl.training.step import Loss, Update
from meshdsl.training.stopping import Stops
from meshdsl.training.trainable import Trainable, trained

if TYPE_CHECKING:
    from meshdsl.running.jit import Options


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves.

    Attributes:
        state: the last one.
        losses: of every step that this run took.
        history: what was reported.
        step: how many steps had been taken at the end, those of the run it went on from included.
    """

    state: TrainState
    losses: list[float]
    history: list[dict[str, float]]
    step: int


def train(
    init: Callable[[Tensor], Any],
    loss: Loss,
    optimizer: Optimizer | Transformation,
    batches: Iterable[Mapping[str, Any]],
    *,
    steps: int,
    mesh: MeshLike | None = None,
    layout: LayoutLike | None = None,
    backend: str = "jax",
    seed: int = 0,
    clip_norm: float | None = None,
    policy: Policy | str | None = None,
    microbatches: int = 1,
    batch_dim: str = "batch",
    nonfinite: Literal["stop", "skip"] = "stop",
    loss_scaling: LossScaling | None = None,
    extra_metrics: Sequence[str] = (),
    trainable: Trainable | None = None,
    update: Update | None = None,
    options: Options | None = None,
    steps_per_call: int = 1,
    batch_dims: Mapping[str, DimsLike] | None = None,
    batch_ramp: BatchRamp | None = None,
    eval_batches: Iterable[Mapping[str, Any]] | None = None,
    test_batches: Iterable[Mapping[str, Any]] | None = None,
    log_every: int = 10,
    eval_every: int | None = None,
    tokens_per_batch: int | None = None,
    workdir: str | os.PathLike[str] | None = None,
    saving: Saving | None = None,
    stops: Stops | None = None,
    profile: ProfiledSteps | None = None,
    init_from: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains a model for a number of steps, or goes on where an earlier run was stopped.

    Args:
        init: from a key to the parameters; traced.
        loss: (params, batch) -> the loss, or (the loss, {name: metric}); traced.
        optimizer: one of `meshdsl.optim`, or of optax; see `meshdsl.optim.from_optax`.
        batches: dicts of NamedArrays, or of arrays whose dims `batch_dims` names.
        mesh, layout, backend: as in `md.jit`.
        seed: of the initial parameters.
        clip_norm, microbatches, batch_dim: as in `make_train_step`.
        policy: dtypes, as in `make_train_step`, or their text: `"params=float32,compute=bfloat16"`.
        nonfinite: what a step does whose loss or gradients are not finite, which changes nothing:
            it stops the run, or is skipped with a warning; both name the first such gradient.
        loss_scaling, extra_metrics: as in `make_train_step`.
        trainable: which parameters are trained: patterns such as `"blocks/**/lora*"`, or a function
            of path and shape. The others have no gradient, no optimizer state and no decay, and
            stay to the bit. By default all are.
        update: changes parameters that no gradient trains, after the optimizer; as in
            `make_train_step`.
        options: as in `md.jit`.
        steps_per_call: how many steps the devices do without the host in between; numbers of steps
            are multiples of it.
        batch_dims: the dims of each entry of a batch: `{"image": ["batch", "pixel"]}`.
        batch_ramp: batches grow at the start of the run; they must be able to (see `feeding`).
        eval_batches: held-out batches, gone through from the start by each evaluation.
        test_batches: others, gone through once, after the last step: metrics `test_loss` and so on.
        log_every: steps between two reports.
        eval_every: steps between two evaluations. None: once, at the end.
        tokens_per_batch: what `tokens_per_second` counts, if anything; of a full batch.
        workdir: the folder for `metrics.jsonl` and TensorBoard; None writes nothing. Of several
            processes only the first writes, and shows progress.
        saving: what is saved in the workdir, and when; see `Saving`. A run whose workdir has a
            checkpoint goes on from there, with its state and at its place in the data.
        stops: what ends the run early, besides signals: see `Stops`.
        profile: steps whose profile is written to `profile` in the workdir, by each process.
        init_from: safetensors with the parameters to start from, instead of those of `init`; see
            `load_weights`. Of those that `trainable` names, files may lack some, such as adapters:
            these are initialised, and told. A checkpoint in the workdir goes before all of them.
        quiet: show no progress.

    Returns:
        The final state, and the metrics.

    Raises:
        ValueError: an argument is of another kind, the layout or the mesh do not fit, a batch
            differs from the first or has unnamed entries, the data ends early, a number is out of
            range, or a step was not finite and stops the run; another run has the workdir, or its
            checkpoint is of another job.
        KeyboardInterrupt: after Ctrl-C; the metrics up to there are written, and the state saved.
        Stopped: likewise, after SIGTERM.
    """
    check_arguments(locals())
    stops = stops or Stops()
    check_numbers(
        steps_per_call,
        workdir,
        saving,
        profile,
        steps=steps,
        log_every=log_every,
        eval_every=eval_every,
        microbatches=microbatches,
        exit_at_step=stops.at_step,
    )
    recipe = Recipe(
        init,
        loss,
        optimizer,
        clip_norm,
        Policy.of(policy),
        microbatches,
        batch_dim,
        nonfinite,
        loss_scaling,
        extra_metrics,
        trainable,
        update,
    )
    feed = Feed(batches, batch_dims, steps_per_call, batch_ramp, batch_dim)
    held_out = _held_out(batch_dims, batch_dim, eval=eval_batches, test=test_batches)
    place = Place(mesh, layout, backend, options)
    programs = Programs(
        recipe,
        place,
        steps_per_call,
        feed.specs(),
        {name: data.specs() for name, data in held_out.items()},
    )
    runtime = programs.step.runtime
    check_saves_together(runtime.process_count(), saving)
    if profile is not None and runtime.profile is None:
        raise ValueError(f"backend {backend} has no devices to profile; take another")
    first = runtime.process_index() == 0
    weights = None
    if init_from is not None and not (saving and workdir and begun_in(workdir)):
        weights = checked_weights(init_from, programs.state.params, trainable)
    with ExitStack() as stack:
        signals = stack.enter_context(ExitStack())  # they are listened to until all is saved
        folder = workdir if first else None
        if folder is not None:
            stack.enter_context(held(folder))
        stack.callback(feed.close)
        for which in (feed.full, *held_out):
            programs.compiled(which)
        checkpoints, found = None, None
        if saving is not None and workdir is not None:
            feed.position()  # which has to be something to store
            checkpoints = stack.enter_context(saving.open(workdir))
            found = saving.find(checkpoints, programs.state, programs.places(feed.full))
        if found is not None:
            beginning = going_on(found, feed, steps_per_call)
        elif weights is not None:
            beginning = Beginning(state_of_weights(weights, recipe, place, programs, seed))
        else:
            beginning = Beginning(programs.first_state(seed))
        feed.rows = programs.rows
        if first and not quiet and found is not None:
            unused = "" if init_from is None else f", and not from the weights {init_from}"
            tell(f"going on from step {found.step:,}, {found.folder}{unused}")
        if first and not quiet and weights is not None:
            tell(str(weights))
        progress = stack.enter_context(Progress(steps)) if first and not quiet else None
        writer = None
        if folder is not None:
            writer = stack.enter_context(MetricsWriter(folder, beginning.step, beginning.reports))
        sinks: list[Callable[[int, Mapping[str, Any]], None]]
        sinks = [sink for sink in (writer and writer.write, progress and progress.log) if sink]
        if first and saving is not None and saving.data is not None:
            sinks.append(stack.enter_context(saving.data.reading()))
        learning = trained(programs.state.params, trainable)
        run = Run(
            programs=programs,
            state=beginning.state,
            feed=feed,
            held_out={
                name: stack.enter_context(data.reading(programs.rows(name)))
                for name, data in held_out.items()
            },
            begun=beginning.step,
            evaluated=beginning.evaluated or not held_out,
            reported=beginning.reports,
            steps=steps,
            at_once=steps_per_call,
            log_every=log_every,
            eval_every=eval_every or steps,
            meters=Meters(
                tokens_per_batch, programs.model_flops(feed.full), programs.mesh.size, runtime
            ),
            finite_check=FiniteCheck(nonfinite == "stop", gradient_paths(learning)),
            stops=stops,
            profiler=stack.enter_context(Profiler(profile, runtime, workdir)),
            saving=saving,
            checkpoints=checkpoints,
            sinks=sinks,
        )
        signals.enter_context(stops.listening())
        run.run()
    if run.interrupted:
        stops.check(run.done, steps)
    return TrainResult(run.state, run.losses, run.history, run.done)


def _held_out(
    dims: Mapping[str, DimsLike] | None,
    batch_dim: str,
    **batches: Iterable[Mapping[str, Any]] | None,
) -> dict[str, Named]:
    """Returns the batches that there are to evaluate with, by the name of the evaluation.

    Raises:
        ValueError: they can be gone through only once.
    """
    given = {f"{name}_batches": each for name, each in batches.items() if each is not None}
    once = [name for name, each in given.items() if iterator(each, name) is each]
    if once:
        raise ValueError(f"{', '.join(once)} can be gone through only once; give a list of batches")
    return {
        name.removesuffix("_batches"): Named(each, dims, name, batch_dim)
        for name, each in given.items()
    }
