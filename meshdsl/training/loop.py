"""The training loop: any init function, loss function and data, on any mesh.

Guarantees:
    The layout is checked against the training step before anything is allocated.
    A run that goes on from a checkpoint takes the same steps, to the same losses, as one that was
    never stopped. Where the run saves, Ctrl-C and SIGTERM lose nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax

from meshdsl.array import NamedArray, Spec, spec
from meshdsl.dims import DimsLike
from meshdsl.graph import Tensor
from meshdsl.jit import Compiled, jit
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.validate import LayoutWarning, ScopeWarning, check_scopes
from meshdsl.mesh import Mesh
from meshdsl.ops.random import KEY, key
from meshdsl.optim.optimizer import Optimizer
from meshdsl.policy import Policy
from meshdsl.training.feeding import Feed, Named, first_of
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.metrics import MetricsWriter, Progress
from meshdsl.training.nonfinite import Watch, gradient_paths
from meshdsl.training.run import Run
from meshdsl.training.saving import Saving
from meshdsl.training.state import TrainState, create, spec_of
from meshdsl.training.step import Loss, make_eval_step, make_train_step
from meshdsl.training.stopping import Stops
from meshdsl.training.workdir import held

if TYPE_CHECKING:
    from meshdsl.jit import Options


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
    optimizer: Optimizer,
    batches: Iterable[Mapping[str, Any]],
    *,
    steps: int,
    mesh: Mesh | str | None = None,
    layout: Layout | str | None = None,
    backend: str = "jax",
    seed: int = 0,
    clip_norm: float | None = None,
    policy: Policy | None = None,
    microbatches: int = 1,
    batch_dim: str = "batch",
    nonfinite: Literal["stop", "skip"] = "stop",
    loss_scaling: LossScaling | None = None,
    extra_metrics: Sequence[str] = (),
    options: Options | None = None,
    steps_per_call: int = 1,
    batch_dims: Mapping[str, DimsLike] | None = None,
    eval_batches: Iterable[Mapping[str, Any]] | None = None,
    log_every: int = 10,
    eval_every: int | None = None,
    tokens_per_batch: int | None = None,
    workdir: str | os.PathLike[str] | None = None,
    saving: Saving | None = None,
    stops: Stops | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains a model for a number of steps, or goes on where an earlier run was stopped.

    Args:
        init: from a key to the parameters; traced.
        loss: (params, batch) -> the loss, or (the loss, {name: metric}); traced.
        batches: dicts of NamedArrays, or of arrays whose dims `batch_dims` names.
        mesh, layout, backend: as in `md.jit`.
        seed: of the initial parameters.
        clip_norm, policy, microbatches, batch_dim: as in `make_train_step`.
        nonfinite: what a step does whose loss or gradients are not finite, which changes nothing:
            it stops the run, or is skipped with a warning; both name the first such gradient.
        loss_scaling, extra_metrics: as in `make_train_step`.
        options: as in `md.jit`.
        steps_per_call: how many steps the devices do without the host in between; numbers of steps
            are multiples of it.
        batch_dims: the dims of each entry of a batch: `{"image": ["batch", "pixel"]}`.
        eval_batches: held-out batches, gone through from the start by each evaluation.
        log_every: steps between two reports.
        eval_every: steps between two evaluations. None: once, at the end.
        tokens_per_batch: what `tokens_per_second` counts, if anything.
        workdir: the folder for `metrics.jsonl` and TensorBoard; None writes nothing. Of several
            processes only the first writes, and shows progress.
        saving: what is saved in the workdir, and when; see `Saving`. A run whose workdir has a
            checkpoint goes on from there, with its state and at its place in the data.
        stops: what ends the run early, besides signals: see `Stops`.
        quiet: show no progress.

    Returns:
        The final state, and the metrics.

    Raises:
        ValueError: the layout or the mesh do not fit, a batch differs from the first or has
            unnamed entries, the data ends early, a number is out of range, or a step was not
            finite and stops the run; another run has the workdir, or its checkpoint is of another
            job.
        KeyboardInterrupt: after Ctrl-C; the metrics up to there are written, and the state saved.
        Stopped: likewise, after SIGTERM.
    """
    stops = stops or Stops()
    _check_saving(workdir, saving)
    every = None if saving is None else saving.every
    local_every = None if saving is None else saving.local_every
    _check_at_least_one(
        steps=steps,
        log_every=log_every,
        eval_every=eval_every,
        microbatches=microbatches,
        steps_per_call=steps_per_call,
        checkpoint_every=every,
        local_every=local_every,
        exit_at_step=stops.at_step,
    )
    _check_multiples(
        steps_per_call,
        steps=steps,
        log_every=log_every,
        eval_every=eval_every,
        checkpoint_every=every,
        local_every=local_every,
    )
    if eval_batches is not None and iter(eval_batches) is eval_batches:
        raise ValueError("eval_batches can be gone through only once; give a list of batches")
    feed = Feed(batches, batch_dims, steps_per_call)
    eval_data = None if eval_batches is None else Named(eval_batches, batch_dims, "eval_batches")

    make_state = create(init, optimizer, policy, True, loss_scaling)
    train_step = make_train_step(
        loss,
        optimizer,
        clip_norm,
        policy,
        microbatches,
        batch_dim,
        skip_nonfinite=True,
        loss_scaling=loss_scaling,
        extra_metrics=extra_metrics,
    )
    state_spec, batch_spec = spec_of(make_state), _specs(feed.first)
    step = jit(
        train_step,
        mesh,
        layout,
        backend,
        donate="state",
        options=options,
        steps_per_call=steps_per_call,
    )
    _check_saves_together(step.processes, saving)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScopeWarning)  # an error of its own, here
        step_program = step.lower(state_spec, batch_spec)
        check_scopes(step_program.layout, step_program.mesh, step_program.details["paths"])
        warnings.simplefilter("ignore", LayoutWarning)  # the step has told it
        eval_program = None
        if eval_data is not None:
            eval_spec = _specs(first_of(iter(eval_data), eval_data.role))
            eval_step = make_eval_step(loss, policy)
            evaluation = jit(eval_step, mesh, layout, backend, options=options)
            eval_program = evaluation.lower(state_spec.params, eval_spec)

    def create_state(key: Tensor) -> dict[str, TrainState]:
        return {"state": make_state(key)}  # the result's paths are then those of the step's state

    with ExitStack() as stack:
        folder = workdir if step.reports else None
        if folder is not None:
            stack.enter_context(held(folder))
        compiled = step_program.compile()
        checkpoints, found = None, None
        if saving is not None and workdir is not None:
            checkpoints = stack.enter_context(saving.open(workdir))
            found = saving.find(checkpoints, state_spec, _places(compiled, state_spec))
        if found is None:
            creation = jit(create_state, mesh, layout, backend, options=options)
            state = creation.lower(spec([KEY], "uint32")).compile()(key(seed))["state"]
        else:
            state = found.state
            feed.seek(found.step, found.position)
        begun = 0 if found is None else found.step
        shows = step.reports and not quiet
        if shows and found is not None:
            print(f"going on from step {begun:,}, {found.folder}", flush=True)
        progress = stack.enter_context(Progress(steps)) if shows else None
        writer = None if folder is None else stack.enter_context(MetricsWriter(folder, begun))
        run = Run(
            step=compiled,
            evaluate=None if eval_program is None else eval_program.compile(),
            state=state,
            feed=feed,
            eval_batches=eval_data,
            begun=begun,
            steps=steps,
            at_once=steps_per_call,
            log_every=log_every,
            eval_every=eval_every or steps,
            tokens_per_batch=tokens_per_batch,
            watch=Watch(nonfinite == "stop", gradient_paths(state_spec.params)),
            stops=stops,
            saving=saving,
            checkpoints=checkpoints,
            sinks=[sink for sink in (writer and writer.write, progress and progress.log) if sink],
        )
        run.run()
    stops.check(run.done, steps)
    return TrainResult(run.state, run.losses, run.history, run.done)


def _check_saving(workdir: str | os.PathLike[str] | None, saving: Saving | None) -> None:
    """Raises ValueError if there is something to save without all that it needs."""
    if saving is not None and workdir is None:
        raise ValueError("saving needs a workdir, where checkpoints are kept")
    if saving is not None and (saving.local is None) != (saving.local_every is None):
        raise ValueError("local checkpoints need both a folder and how often they are saved")


def _check_saves_together(processes: int, saving: Saving | None) -> None:
    """Raises ValueError if several processes would save without knowing of each other."""
    if saving is not None and processes not in (1, jax.process_count()):
        raise ValueError(
            f"the {processes} processes of TF_CONFIG cannot save checkpoints together: leave out "
            "--workdir (`saving` in Python), or run them on JAX (--backend=jax --coordinator=...)"
        )


def _places(compiled: Compiled, state: TrainState) -> list[Any]:
    """Returns the shardings of a state without pads, as a step takes it; None on other backends."""
    count = len(jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, Spec)))
    stored = getattr(compiled.executable, "inputs", [None] * count)
    return [getattr(each, "even", None) for each in stored[:count]]


def _specs(batch: Mapping[str, NamedArray]) -> dict[str, Any]:
    return {name: spec(array.dims, array.dtype) for name, array in batch.items()}


def _check_multiples(of: int, **numbers: int | None) -> None:
    wrong = {name: n for name, n in numbers.items() if n is not None and n % of}
    if wrong:
        told = ", ".join(f"{name}={n}" for name, n in wrong.items())
        raise ValueError(f"steps_per_call={of} steps are done at once, which do not divide {told}")


def _check_at_least_one(**numbers: int | None) -> None:
    wrong = {name: n for name, n in numbers.items() if n is not None and n < 1}
    if wrong:
        told = [f"{name} must be at least 1, got {n}" for name, n in wrong.items()]
        raise ValueError("; ".join(told))
