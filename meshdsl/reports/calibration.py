"""The report of a calibration: how well its laws fit what was measured, family by family."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshdsl.layouts.calibration import Calibration
from meshdsl.layouts.costs import Sizes
from meshdsl.layouts.fits import SIZES, Fit, kind_of
from meshdsl.lowering.costs.units import show_bytes, show_flops, show_seconds, show_share


def report(calibration: Calibration) -> RenderableType:
    """Returns the report, for a console of `rich`."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("family")
    for name in ("points", "law: median", "worst", "between points: median", "worst"):
        table.add_column(name, justify="right")
    table.add_column("the worst of these")
    for family, fit in calibration.fits.items():
        table.add_row(family, *_errors(fit))
    return Group(Text("\n".join(_head(calibration))), table, Text(_MEANING))


_MEANING = (
    "law: error of the fitted law alone. Between points: error where a point is left out and "
    "interpolated from the others; at the points themselves, times are those measured."
)


def errors_of_law(fit: Fit) -> Mapping[Sizes, float]:
    """Returns the relative error of the law of a family at each point."""
    return {sizes: fit.law(sizes) / seconds - 1 for sizes, seconds in fit.measured.items()}


def errors_between(fit: Fit) -> Mapping[Sizes, float]:
    """Returns the relative error at each point if it is interpolated from the others."""
    return {sizes: fit.left_out(sizes) / seconds - 1 for sizes, seconds in fit.measured.items()}


def _errors(fit: Fit) -> list[str]:
    law, between = errors_of_law(fit), errors_between(fit)
    cells = [str(len(fit.measured))]
    for errors in (law, between):
        sizes = [abs(error) for error in errors.values()]
        cells += [show_share(statistics.median(sizes)), show_share(max(sizes))]
    if len(fit.measured) == 1:
        return [cells[0], "", "", "", "", ""]
    worst = max(between, key=lambda known: abs(between[known]))
    names = zip(SIZES[kind_of(fit.family)], worst, strict=True)
    where = ", ".join(f"{name} {size:,}" for name, size in names)
    measured, fitted = fit.measured[worst], fit.measured[worst] * (1 + between[worst])
    text = f"{where}: measured {show_seconds(measured)}, fitted {show_seconds(fitted)}"
    return [*cells, text]


def _head(calibration: Calibration) -> list[str]:
    machine, hardware = calibration.machine, calibration.hardware
    lines = [
        f"{machine} of {machine.host}: {machine.processor}, {machine.cores} cores; jaxlib "
        f"{machine.jaxlib}, {calibration.date}"
    ]
    names = {8: "float64", 4: "float32", 2: "16 bits", 1: "8 bits"}
    peaks = [f"{show_flops(peak)}/s in {names[width]}" for width, peak in hardware.flops.items()]
    lines.append(
        f"best of one device, all at work: {', '.join(peaks)}; "
        f"{show_bytes(hardware.memory_bandwidth)}/s of memory; "
        f"{show_bytes(hardware.link_bandwidth)}/s of what is sent"
    )
    if calibration.overlap:
        shares = [f"{kind} {show_share(share)}" for kind, share in calibration.overlap.items()]
        lines.append(f"share of a collective that travels beside a product: {', '.join(shares)}")
    if calibration.clock == "processor":
        lines.append(
            "times are processor times over the number of cores: those of a machine that does "
            "nothing else"
        )
    return lines
