"""Partition rules of Fourier transforms: the transformed dim is whole; see `linalg`."""

from __future__ import annotations

from meshdsl.lowering.partition.products.linalg import whole_dims
from meshdsl.lowering.partition.strategy import Case, Strategy


def fft(case: Case) -> Strategy:
    """A transform is linear, so partial sums pass."""
    params = case.operation.params
    names = [params["dim"]] + ([params["into"].name] if "into" in params else [])
    return whole_dims(case, names, params)


RULES = dict.fromkeys(["fft", "ifft", "rfft", "irfft"], fft)
