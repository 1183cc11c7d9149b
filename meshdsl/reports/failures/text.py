"""The text of failures: who holds the state, what is survived, and what failures cost."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.hosts import Survival
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.explain.lines import table, wrapped
from meshdsl.reports.failures.prediction import (
    COPY_BANDWIDTH,
    RECONNECTING,
    Prediction,
    Way,
)
from meshdsl.reports.failures.states import ON_EVERY_HOST, Failures, State

_WIDTH = 120
_HOUR = 3600.0
_HOSTS = 4  # that are shown of a set
_SETS = 56  # characters for the sets of a line


def show(report: Failures, prediction: Prediction | None = None) -> str:
    """Returns the report.

    Args:
        prediction: what failures cost, if it is asked for.
    """
    sections = [_head(report)]
    if prediction is not None:
        sections += [_goodput(prediction), _costs(report, prediction)]
    sections += [_states(report), _sets(report), _together(report)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(report: Failures) -> list[str]:
    hosts = _many(report.domains.count, "host")
    where = f" on {report.mesh}" if report.mesh.axes else ""
    text = f"{_many(report.mesh.size, 'device')} on {hosts}"
    if report.slices is not None:
        text += f" of {_many(report.slices.count, 'slice')}"
    per = min(report.devices_per_host, report.mesh.size)
    each = f"a host has {per} consecutive devices" if per > 1 else "each device has a host"
    return [f"{report.name}{where}: {text}; {each}"]


def _states(report: Failures) -> list[str]:
    slices = report.slices is not None
    head = ["state", "tensors", "split over", "copies along", "shards", "devices", "hosts"]
    rows = [(*head, "on a host", "lost hosts survived", *["lost slices"] * slices)]
    for state in report.states:
        row = [
            state.name,
            f"{state.tensors:,}",
            "; ".join(state.splits) or "not split",
            "+".join(state.replicas) or "none",
            f"{state.shards:,}",
            f"{state.copies:,}",
            f"{state.hosts.least:,}",
            show_bytes(state.bytes_of_host),
            _survived(state.hosts),
        ]
        rows.append((*row, *([_survived(state.slices)] if state.slices is not None else [])))
    every = [f"{report.domains.count:,}", "", _all_but_one(report.domains.count)]
    for name in ON_EVERY_HOST:
        row = [name, "", "", "every host", "", "", *every]
        rows.append((*row, *([_all_but_one(report.slices.count)] if report.slices else [])))
    return [
        "who holds each shard of the state: devices, and hosts",
        *table(rows, right=(1, 4, 5, 6, 7), squeezed=2, width=_WIDTH),
    ]


def _sets(report: Failures) -> list[str]:
    """Returns the sets of hosts that have all copies of a shard, of each state."""
    if report.domains.count == 1:
        return []
    names: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for state in report.states:
        names.setdefault(tuple(sorted(report.domains.holders(state.axes))), []).append(state.name)
    rows: list[Sequence[str]] = []
    for sets, of in names.items():
        shown: list[str] = []
        for one in sets:
            shown.append(_hosts(one, report.domains.count))
            if len("; ".join(shown)) > _SETS:
                break
        more = [f"and {len(sets) - len(shown):,} more (--json)"] * (len(sets) > len(shown))
        rows.append((", ".join(dict.fromkeys(of)), "; ".join([*shown, *more])))
    return [
        "lost together, the hosts of one of these sets take a shard with them",
        *table(rows, right=(), squeezed=0, width=_WIDTH),
    ]


def _hosts(hosts: Sequence[int], count: int) -> str:
    """Returns a set of hosts: `0+4`."""
    if len(hosts) == count:
        return f"all {count:,}"
    shown = "+".join(map(str, hosts[:_HOSTS]))
    return f"{shown}+... ({len(hosts):,} hosts)" if len(hosts) > _HOSTS else shown


def _survived(survival: Survival) -> str:
    """Returns which losses are survived: `any 1; 98 % of pairs`."""
    if survival.least > 2:
        return f"any {survival.least - 1:,}"
    if survival.least == 2:
        kept = survival.pairs - survival.fatal_pairs
        return f"any 1; {kept:,} of {survival.pairs:,} pairs" if kept else "any 1"
    left = survival.count - len(survival.fatal)
    return f"{left:,} of {survival.count:,}" if left else "none"


def _all_but_one(count: int) -> str:
    return f"any {count - 1:,}" if count > 1 else "none"


def _together(report: Failures) -> list[str]:
    hosts, lines = report.together, []
    if hosts.least > 2:
        says = f"of any {hosts.least - 1:,} hosts"
    elif hosts.least == 2:
        kept = hosts.pairs - hosts.fatal_pairs
        says = "of any host"
        if kept:
            says += f", and of {kept:,} of the {hosts.pairs:,} pairs of hosts"
            says += f" ({100 * hosts.pair_share:.1f} %)"
    elif len(hosts.fatal) < hosts.count:
        says = f"of {hosts.count - len(hosts.fatal):,} of the {hosts.count:,} hosts"
    else:
        says = "of no host"
    text = f"without a checkpoint, the state survives the loss {says}"
    if report.slices is not None:
        text += f"; and of {'a whole' if report.slices.least > 1 else 'no'} slice"
    lines += wrapped("", text, _WIDTH)
    if hosts.least > 1:
        text = f"a host that comes back receives {show_bytes(report.bytes_of_host)} from others"
        if report.slices is not None and report.slices.least > 1:
            text += f", a slice {show_bytes(report.bytes_of_slice)}"
        lines.append(text)
    return lines + _held_once(report)


def _held_once(report: Failures) -> list[str]:
    """Returns what a single host holds, and what changes it."""
    once = report.held_once
    if not once:
        return []
    names = ", ".join(dict.fromkeys(f"{state.name} ({_split(state)})" for state in once))
    if report.domains.count == 1:
        return wrapped("held by a single host: ", f"all; there is one: {names}", _WIDTH)
    inside = sorted({axis for state in once for axis in state.replicas})
    if inside:
        advice = f"copies along {'+'.join(inside)} are on the same host; an axis before it, as"
    else:
        advice = "their axes leave no copy; an axis that splits only the batch, as"
    advice += " `replica:2` as the first axis of the mesh, keeps them on two hosts"
    return wrapped("held by a single host: ", f"{names}; {advice}", _WIDTH)


def _split(state: State) -> str:
    return "; ".join(state.splits) or "not split"


def _costs(report: Failures, prediction: Prediction) -> list[str]:
    costs, faults = prediction.costs, prediction.checkpoints.faults
    lines = wrapped(
        "failures: ",
        f"one in {_long(costs.mtbf)} of a host is {_rate(prediction.failures_per_day)} for "
        f"{_many(report.domains.count, 'host')}, one in {_long(faults.mtbf)}",
        _WIDTH,
    )
    lines += wrapped(
        "saving: ",
        f"the step waits {_long(faults.save)} for {show_bytes(report.bytes_of_device)} from each "
        f"device ({COPY_BANDWIDTH / 1e9:.1f} GB/s assumed); a host writes "
        f"{show_bytes(report.bytes_of_host)} in {_long(faults.write)} beside the steps "
        f"(--storage_bandwidth: {costs.storage / 1e9:,.3g} GB/s of a host)",
        _WIDTH,
    )
    lines += wrapped(
        "restart: ",
        f"{_long(faults.restart)}: {_long(costs.restart)} (--restart_time), and "
        f"{_long(faults.write)} to read the checkpoint",
        _WIDTH,
    )
    if prediction.replicas is not None:
        lines += wrapped(
            "from other hosts: ",
            f"{_long(prediction.replicas.faults.recovery)}: {RECONNECTING:.0f} s to notice and to "
            f"connect (assumed), {_long(prediction.transfer)} to send the shards, and a step again",
            _WIDTH,
        )
    return lines


def _goodput(prediction: Prediction) -> list[str]:
    ways = [("from checkpoints", prediction.checkpoints)]
    ways += [("from other hosts", prediction.replicas)] if prediction.replicas else []
    rows: list[Sequence[str]] = [("", *(name for name, _ in ways))]
    rows.append(("best interval", *(_interval(way, prediction.step) for _, way in ways)))
    rows.append(("  by Young, by Daly", *(_published(way, prediction.step) for _, way in ways)))
    for title, name in (
        ("useful steps", "useful"),
        ("  saving", "saving"),
        ("  steps taken again", "lost"),
        ("  restarting", "restarting"),
        ("  recovering", "recovering"),
    ):
        rows.append((title, *(_percent(getattr(way.shares, name)) for _, way in ways)))
    if prediction.every is not None:
        title = f"useful, --checkpoint_every={prediction.every}"
        rows.append((title, *(_percent(way.given.useful) for _, way in ways if way.given)))
    lines = [f"goodput, at {show_seconds(prediction.step)} per step", *table(rows, right=(1, 2))]
    if prediction.replicas is None:
        return lines + wrapped(
            "", "from other hosts: no, since every host holds what no other does", _WIDTH
        )
    return lines + wrapped(
        "",
        "from other hosts is what a recovery from copies without a restart would give, if no three "
        "hosts are lost at once; `train` restarts: with --host_copies from copies in the hosts' "
        "memory, else from checkpoints",
        _WIDTH,
    )


def _interval(way: Way, step: float) -> str:
    if way.steps is None:
        return "no need"
    return f"{way.steps:,} steps, {_long(way.steps * step)}"


def _published(way: Way, step: float) -> str:
    if way.steps is None:
        return ""
    return f"{way.faults.young / step:,.0f}, {way.faults.daly / step:,.0f} steps"


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %"


def _rate(per_day: float) -> str:
    return f"{per_day:.3g} per day"


def _long(seconds: float) -> str:
    """Returns a time, in hours where it is long."""
    if seconds < 2 * _HOUR:
        return show_seconds(seconds)
    return f"{seconds / _HOUR:,.1f}".removesuffix(".0") + " h"


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' if count > 1 else ''}"
