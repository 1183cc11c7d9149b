"""Fits: the time of a family of operations as a law of their sizes, and what measurements add.

A law is a sum of terms with factors that are not negative: a latency, the flops, the bytes. The
factors have the least sum of squared relative errors. Between the sizes that were measured, the
ratio of law and measurement is interpolated, as `layouts.costs` does with efficiencies. Beyond them
the law goes on, with the ratio of the nearest size.

The first word of a family's name decides its terms: `products/float32/rows` has those of
`products`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from meshdsl.layouts.costs import Family, Sizes
from meshdsl.layouts.hardware import COLLECTIVES

Terms = Callable[..., tuple[float, ...]]


def _of_products(batch: float, rows: float, inner: float, columns: float) -> tuple[float, ...]:
    moved = rows * inner + inner * columns + rows * columns
    return 1.0, batch, batch * rows * inner * columns, batch * moved


def _of_attention(count: float, rows: float, columns: float, features: float) -> tuple[float, ...]:
    scores = count * rows * columns
    return 1.0, count, scores, scores * features, count * (rows + columns) * features


def _of_rows(rows: float, row_bytes: float) -> tuple[float, ...]:
    return 1.0, rows, rows * row_bytes


def _of_scatters(rows: float, row_bytes: float, table_rows: float) -> tuple[float, ...]:
    return 1.0, rows, rows * row_bytes, table_rows * row_bytes


def _of_collectives(devices: float, payload: float) -> tuple[float, ...]:
    return 1.0, devices, payload, devices * payload


def _linear(count: float) -> tuple[float, ...]:
    return 1.0, count


# What the sizes of each family are, and the terms of its law.
SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "products": ("batch", "rows", "inner", "columns"),
        "elementwise": ("bytes",),
        "functions": ("elements",),
        "reductions": ("bytes",),
        "gathers": ("rows", "row bytes"),
        "scatters": ("rows", "row bytes", "table rows"),
        "attention": ("count", "rows", "columns", "features"),
        "attention_gradient": ("count", "rows", "columns", "features"),
        **dict.fromkeys(COLLECTIVES, ("devices", "payload bytes")),
        "sharing": ("devices",),
        "dispatch": ("arrays",),
    }
)
# Functions of two operands. A sample computes its function once for each element; that of `step`
# computes so many additions and multiplications, and that of `cast` casts to bfloat16 and back.
BINARY = ("divide", "power", "remainder")
STEPS, CASTS = 16, 2
_TERMS: Mapping[str, Terms] = MappingProxyType(
    {
        "products": _of_products,
        "attention": _of_attention,
        "attention_gradient": _of_attention,
        "gathers": _of_rows,
        "scatters": _of_scatters,
        **dict.fromkeys(COLLECTIVES, _of_collectives),
    }
)


def runs_of(function: str) -> int:
    """Returns how often a sample of a function computes it for each element."""
    return {"step": STEPS, "cast": CASTS}.get(function, 1)


def arrays_of(function: str) -> int:
    """Returns how many arrays a sample of a function moves: operands and a result, in float32."""
    return 3 if function == "step" or function in BINARY else 2


def of_attention(op: str, dtype: str) -> str:
    """Returns the family of attention, or of its gradient, for operands of a dtype."""
    return op if dtype == "float32" else f"{op}/{dtype}"


def kind_of(family: str) -> str:
    """Returns the first word of a family's name, which decides its sizes and its law."""
    return family.partition("/")[0]


@dataclass(frozen=True)
class Fit:
    """The law of a family, fitted to measured seconds: `Fit.of("elementwise", {(4096,): 2e-6})`."""

    family: str
    measured: Mapping[Sizes, float]

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """The seconds for one unit of each term."""
        # Imported here, since it takes a third of a second and few programs read a calibration.
        from scipy.optimize import nnls  # type: ignore[import-untyped]

        sizes, seconds = zip(*self.measured.items(), strict=True)
        terms = np.array([self._terms(one) for one in sizes])
        relative = terms / np.array(seconds)[:, None]
        scale = np.maximum(relative.max(axis=0), np.finfo(float).tiny)
        solution, _ = nnls(relative / scale, np.ones(len(seconds)))
        return tuple(map(float, solution / scale))

    @cached_property
    def _ratio(self) -> Family:
        rows = self.measured.items()
        return Family({sizes: self.law(sizes) / seconds for sizes, seconds in rows})

    def _terms(self, sizes: Sequence[float]) -> tuple[float, ...]:
        return _TERMS.get(kind_of(self.family), _linear)(*sizes)

    def law(self, sizes: Sequence[float]) -> float:
        """Returns the seconds of an operation by the law alone."""
        pairs = zip(self.factors, self._terms(sizes), strict=True)
        return sum(factor * term for factor, term in pairs)

    def seconds(self, sizes: Sequence[float]) -> float:
        """Returns the seconds of an operation: those measured, where it was measured."""
        return self.law(sizes) / self._ratio.at(sizes)

    def left_out(self, sizes: Sizes) -> float:
        """Returns the seconds of a measured operation by the others of its family."""
        others = {known: s for known, s in self.measured.items() if known != sizes}
        return Fit(self.family, others).seconds(sizes) if others else self.measured[sizes]
