"""Failures as values for JSON: what the text has, in seconds and bytes, and each shard's hosts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshdsl.layouts.hosts import Survival
from meshdsl.reports.failures.prediction import Prediction, Way
from meshdsl.reports.failures.states import ON_EVERY_HOST, Failures, State


def as_values(report: Failures, prediction: Prediction | None = None) -> dict[str, Any]:
    """Returns a report as values; arguments as of `text.show`."""
    return {
        "program": report.name,
        "mesh": str(report.mesh),
        "devices_per_host": report.devices_per_host,
        "hosts": report.domains.count,
        "slices": 1 if report.slices is None else report.slices.count,
        "states": [_state(state, report) for state in report.states],
        "on_every_host": list(ON_EVERY_HOST),
        "survives": _survival(report.together),
        "survives_slices": None if report.slices is None else _survival(report.slices),
        "held_by_a_single_host": [state.name for state in report.held_once],
        "bytes_of_host": report.bytes_of_host,
        "bytes_of_slice": report.bytes_of_slice,
        "goodput": None if prediction is None else _prediction(prediction),
    }


def _state(state: State, report: Failures) -> dict[str, Any]:
    return {
        "name": state.name,
        "tensors": state.tensors,
        "splits": list(state.splits),
        "copies_along": list(state.replicas),
        "shards": state.shards,
        "devices_of_a_shard": state.copies,
        "hosts_of_each_shard": sorted(report.domains.holders(state.axes)),
        "bytes_of_device": state.bytes,
        "bytes_of_host": state.bytes_of_host,
        "survives": _survival(state.hosts),
        "survives_slices": None if state.slices is None else _survival(state.slices),
    }


def _survival(survival: Survival) -> dict[str, Any]:
    return {
        "any": survival.least - 1,
        "singles": survival.count - len(survival.fatal),
        "of_singles": survival.count,
        "pairs": survival.pairs - survival.fatal_pairs,
        "of_pairs": survival.pairs,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    replicas = prediction.replicas
    return {
        "step_seconds": prediction.step,
        "failures_per_day": prediction.failures_per_day,
        **{f"{name}_of_user": value for name, value in asdict(prediction.costs).items()},
        "transfer_seconds": prediction.transfer,
        "checkpoint_every": prediction.every,
        "from_checkpoints": _way(prediction.checkpoints, prediction.step),
        "from_other_hosts": None if replicas is None else _way(replicas, prediction.step),
    }


def _way(way: Way, step: float) -> dict[str, Any]:
    saves = way.steps is not None
    return {
        "faults": asdict(way.faults),
        "steps": way.steps,
        "seconds": None if way.steps is None else way.steps * step,
        "young_seconds": way.faults.young if saves else None,
        "daly_seconds": way.faults.daly if saves else None,
        "shares": asdict(way.shares),
        "shares_as_given": None if way.given is None else asdict(way.given),
    }
