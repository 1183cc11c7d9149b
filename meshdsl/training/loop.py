"""The training loop: any init function, loss function and data, on any mesh.

Guarantees:
    The layout is checked against the training step before anything is allocated.
    Between two reports the host does not wait for the device, except that it stays at most
    `_AHEAD` steps ahead, so that batches do not pile up.
    Ctrl-C ends the run after the step at hand, with its metrics written; a second one at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from meshdsl.array import NamedArray, named, spec
from meshdsl.dims import DimsLike, did_you_mean
from meshdsl.graph import Tensor
from meshdsl.jit import STEPS, Compiled, jit
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.validate import LayoutWarning, ScopeWarning, check_scopes
from meshdsl.mesh import Mesh
from meshdsl.ops.random import KEY, key
from meshdsl.optim.optimizer import Optimizer
from meshdsl.policy import Policy
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.metrics import MetricsWriter, Progress
from meshdsl.training.nonfinite import Watch, gradient_paths
from meshdsl.training.state import TrainState, create, spec_of
from meshdsl.training.step import Loss, make_eval_step, make_train_step

if TYPE_CHECKING:
    from meshdsl.jit import Options

_AHEAD = 2  # steps that may wait for the device


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves: its last state, the loss of every step, and what was reported."""

    state: TrainState
    losses: list[float]
    history: list[dict[str, float]]


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
    quiet: bool = False,
) -> TrainResult:
    """Trains a model for a number of steps.

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
        quiet: show no progress.

    Returns:
        The final state, and the metrics.

    Raises:
        ValueError: the layout or the mesh do not fit, a batch differs from the first or has
            unnamed entries, the data ends early, a number is out of range, or a step was not
            finite and stops the run.
        KeyboardInterrupt: after Ctrl-C; the metrics up to there are written.
    """
    _check_at_least_one(
        steps=steps,
        log_every=log_every,
        eval_every=eval_every,
        microbatches=microbatches,
        steps_per_call=steps_per_call,
    )
    _check_multiples(steps_per_call, steps=steps, log_every=log_every, eval_every=eval_every)
    if eval_batches is not None and iter(eval_batches) is eval_batches:
        raise ValueError("eval_batches can be gone through only once; give a list of batches")
    train_data = _Named(batches, batch_dims, "batches")
    eval_data = None if eval_batches is None else _Named(eval_batches, batch_dims, "eval_batches")
    source = iter(train_data)
    if steps_per_call > 1:
        source = stacked(source, steps_per_call)
    first = train_data.first(source)

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
    state_spec, batch_spec = spec_of(make_state), _specs(first)
    step = jit(
        train_step,
        mesh,
        layout,
        backend,
        donate="state",
        options=options,
        steps_per_call=steps_per_call,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScopeWarning)  # an error of its own, here
        step_program = step.lower(state_spec, batch_spec)
        check_scopes(step_program.layout, step_program.mesh, step_program.details["paths"])
        warnings.simplefilter("ignore", LayoutWarning)  # the step has told it
        eval_program = None
        if eval_data is not None:
            eval_spec = _specs(eval_data.first(iter(eval_data)))
            eval_step = make_eval_step(loss, policy)
            evaluation = jit(eval_step, mesh, layout, backend, options=options)
            eval_program = evaluation.lower(state_spec.params, eval_spec)

    def create_state(key: Tensor) -> dict[str, TrainState]:
        return {"state": make_state(key)}  # the result's paths are then those of the step's state

    creation = jit(create_state, mesh, layout, backend, options=options)
    init_program = creation.lower(spec([KEY], "uint32"))
    with ExitStack() as stack:
        folder = workdir if step.reports else None
        shows = step.reports and not quiet
        progress = stack.enter_context(Progress(steps)) if shows else None
        writer = None if folder is None else stack.enter_context(MetricsWriter(folder))
        run = _Run(
            step=step_program.compile(),
            evaluate=None if eval_program is None else eval_program.compile(),
            state=init_program.compile()(key(seed))["state"],
            batches=itertools.chain([first], source),
            eval_batches=eval_data,
            steps=steps,
            at_once=steps_per_call,
            log_every=log_every,
            eval_every=eval_every or steps,
            tokens_per_batch=tokens_per_batch,
            watch=Watch(nonfinite == "stop", gradient_paths(state_spec.params)),
            sinks=[sink for sink in (writer and writer.write, progress and progress.log) if sink],
        )
        run.run()
    return TrainResult(run.state, run.losses, run.history)


@dataclass
class _Run:
    """One run, between its first step and its last."""

    step: Compiled
    evaluate: Compiled | None
    state: TrainState
    batches: Iterator[Any]
    eval_batches: Iterable[Any] | None
    steps: int
    at_once: int
    log_every: int
    eval_every: int
    tokens_per_batch: int | None
    watch: Watch
    sinks: list[Callable[[int, Mapping[str, Any]], None]]
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        jax.block_until_ready([array.data for array in _arrays(self.state)])
        pending: list[dict[str, NamedArray]] = []
        started = time.perf_counter()
        with _interruptible() as self.interrupted:
            for number in range(self.at_once, self.steps + 1, self.at_once):
                batch = next(self.batches, None)
                if batch is None:
                    done = number - self.at_once
                    self._report(done, pending, started)
                    raise ValueError(
                        f"the data ended after {done} of {self.steps} steps; give batches "
                        "without end (itertools.cycle repeats a list), or fewer steps"
                    )
                self.state, metrics = self.step(self.state, batch)
                pending.append(metrics)
                if len(pending) > _AHEAD:
                    jax.block_until_ready(pending[-1 - _AHEAD]["loss"].data)
                stops = self.interrupted.is_set()
                evaluates = not stops and (number == self.steps or number % self.eval_every == 0)
                if stops or evaluates or number % self.log_every == 0:
                    self._report(number, pending, started, evaluates)
                    started, pending = time.perf_counter(), []
                if stops:
                    break
        if self.interrupted.is_set():
            raise KeyboardInterrupt(f"interrupted after step {number} of {self.steps}")

    def _report(
        self,
        number: int,
        pending: Sequence[dict[str, NamedArray]],
        started: float,
        evaluates: bool = False,
    ) -> None:
        """Fetches what the steps since the last report returned, and passes it on."""
        if not pending:
            return
        names = ("loss", "first_nonfinite")
        fetched = jax.device_get([[m[name].data for m in pending] for name in names])
        losses, firsts = ([float(v) for vs in found for v in np.ravel(vs)] for found in fetched)
        self.losses += losses
        seconds = (time.perf_counter() - started) / (len(pending) * self.at_once)
        line = {name: float(np.ravel(value)[-1]) for name, value in pending[-1].items()}
        del line["first_nonfinite"]  # a number for `watch`, which tells the name
        line["step_seconds"] = seconds
        if self.tokens_per_batch is not None:
            line["tokens_per_second"] = self.tokens_per_batch / seconds
        if evaluates:
            line |= {f"eval_{name}": value for name, value in self._evaluate().items()}
        self.history.append({"step": number, **line})
        for sink in self.sinks:
            sink(number, line)
        self.watch.look(number - len(losses) + 1, losses, firsts)

    def _evaluate(self) -> dict[str, float]:
        """Returns the metrics of the held-out batches, averaged over the batches."""
        if self.evaluate is None or self.eval_batches is None:
            return {}
        found = []
        for batch in self.eval_batches:
            found.append(self.evaluate(self.state.params, batch))
            if len(found) > _AHEAD:
                jax.block_until_ready(found[-1 - _AHEAD]["loss"].data)
            if self.interrupted.is_set():
                return {}  # an average over some of the batches would be taken for another
        return {name: float(np.mean([float(m[name]) for m in found])) for name in found[0]}


@dataclass(frozen=True)
class _Named:
    """Batches with the names of their dims put on."""

    batches: Iterable[Mapping[str, Any]]
    dims: Mapping[str, DimsLike] | None
    role: str

    def __iter__(self) -> Iterator[dict[str, NamedArray]]:
        return map(self._name, self.batches)

    def first(self, source: Iterator[dict[str, NamedArray]]) -> dict[str, NamedArray]:
        for batch in source:
            return batch
        raise ValueError(f"{self.role}: there is no batch")

    def _name(self, batch: Mapping[str, Any]) -> dict[str, NamedArray]:
        dims = self.dims or {}
        result, problems = {}, []
        for name, entry in batch.items():
            if isinstance(entry, NamedArray):
                result[name] = entry
            elif name in dims:
                result[name] = named(entry, dims[name])
            else:
                hint = did_you_mean(name, dims)
                problems.append(
                    f"entry `{name}` of a batch has no dim names: give NamedArrays, or "
                    f"batch_dims={{{name!r}: [...]}}{hint}"
                )
        if problems:
            raise ValueError("; ".join([f"{self.role}: {problems[0]}", *problems[1:]]))
        return result


def stacked(
    batches: Iterator[dict[str, NamedArray]], count: int
) -> Iterator[dict[str, NamedArray]]:
    """Yields batches together, `count` of them along a first dim `steps`; an end too short is left.

    Raises:
        ValueError: a batch differs from the one before; every difference is told.
    """
    while len(group := list(itertools.islice(batches, count))) == count:
        found = {}
        for name, first in group[0].items():
            arrays = [batch[name] for batch in group]
            for array in arrays:
                if (array.dims, array.dtype) != (first.dims, first.dtype):
                    raise ValueError(f"batches differ: `{name}` is {first!r} and {array!r}")
            data = np.stack([np.asarray(array) for array in arrays])
            found[name] = named(data, [STEPS, *first.dims])
        yield found


def _specs(batch: Mapping[str, NamedArray]) -> dict[str, Any]:
    return {name: spec(array.dims, array.dtype) for name, array in batch.items()}


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event, so that it falls between two steps."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # signals are the main thread's
        return

    def stop(signum: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _arrays(tree: Any) -> list[NamedArray]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, NamedArray))


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
