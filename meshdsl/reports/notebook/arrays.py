"""Arrays: a NamedArray in a notebook, by its dims, statistics, first numbers and devices.

Nothing here gathers a large array: its statistics are computed where it is, and a few of its
numbers are taken. An array that other processes hold a part of shows no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.html.elements import Child, Html, facts, tag
from meshdsl.reports.notebook.blocks import tensor_grid
from meshdsl.reports.notebook.cells import cell, head, quiet
from meshdsl.reports.notebook.chips import dim_chip, dim_chips
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.named_array import NamedArray

_ON_HOST = 1 << 22  # elements: more are not copied from their devices
_ROWS, _COLUMNS = 4, 6
_BAD = ("NaN", "infinite")


def show(x: NamedArray) -> str | None:
    """Returns an array as a cell; None if it has no data that could be shown."""
    if not hasattr(x.data, "dtype") or not hasattr(x.data, "shape"):
        return None
    first = head(tag("code", short(x.dtype)), dim_chips(x.dims), quiet(show_bytes(x.bytes)))
    if isinstance(x.data, jax.core.Tracer):
        return cell(first, tag("p", "traced: it has no numbers here", class_="quiet"))
    if getattr(x.data, "is_deleted", bool)():
        return cell(first, tag("p", "deleted: its memory was given to a call", class_="quiet"))
    return cell(first, numbers(x), where(x))


def numbers(x: NamedArray) -> list[Child]:
    """Returns the statistics of an array and the first numbers of its last two dims."""
    if not isinstance(x.data, np.ndarray | np.generic | jax.Array):
        return []  # such as a `jax.ShapeDtypeStruct`
    if not getattr(x.data, "is_fully_addressable", True):
        return [tag("p", "other processes hold a part of it", class_="quiet")]
    if x.dims.volume == 1:
        return [tag("p", tag("code", _number(np.asarray(x).reshape(-1)[0])), class_="one")]
    data = x.unpadded()
    if x.dims.volume <= _ON_HOST:
        data = np.asarray(data)
    pairs: list[tuple[str, Child]] = [
        (name, tag("code", _number(value), class_="warn" if name in _BAD else None))
        for name, value in statistics(data).items()
    ]
    return [facts(pairs, "statistics"), _corner(data, x.dims)]


def statistics(data: Any) -> dict[str, Any]:
    """Returns least, greatest, mean and deviation of the finite numbers, and how many others are.

    Of booleans it is the number of those that are true; of complex numbers, about their magnitudes.

    Args:
        data: an array of numpy's, or of JAX's, which is reduced on its devices.
    """
    if data.dtype == bool:
        return {"true": int(data.sum()), "of": int(data.size)}
    if isinstance(data, np.ndarray):
        return _named(_reduced(np, data.astype(_wide(data.dtype))), data)
    found = _on_devices(data)
    return _named([np.asarray(one)[()] for one in found], data)


def _wide(dtype: np.dtype) -> np.dtype:
    kinds = {"i": np.int64, "u": np.uint64, "c": np.complex128}
    return np.dtype(kinds.get(np.dtype(dtype).kind, np.float64))


def _reduced(xp: Any, data: Any) -> list[Any]:
    """Returns least, greatest, mean, deviation, and the numbers of NaNs and infinities."""
    if data.dtype.kind == "c":
        data = xp.abs(data)
    if data.dtype.kind in "iu":
        real = data.astype(np.float64 if xp is np else np.float32)
        return [data.min(), data.max(), real.mean(), real.std(), 0, 0]
    finite = xp.isfinite(data)
    count = xp.maximum(finite.sum(dtype=data.dtype), 1)  # int32 ends at 2,147,483,647
    inner = xp.where(finite, data, 0)
    mean = inner.sum() / count
    spread = xp.sqrt((xp.where(finite, data - mean, 0) ** 2).sum() / count)
    least = xp.where(finite, data, np.inf).min()
    greatest = xp.where(finite, data, -np.inf).max()
    bad = [each(data).sum(dtype=data.dtype) for each in (xp.isnan, xp.isinf)]
    return [least, greatest, mean, spread, *bad]


@jax.jit
def _on_devices(data: jax.Array) -> list[jax.Array]:
    wide = data if data.dtype.kind in "iuc" else data.astype(jnp.promote_types(data.dtype, "f4"))
    return _reduced(jnp, wide)


def _named(found: Sequence[Any], data: Any) -> dict[str, Any]:
    least, greatest, mean, spread, nans, infinite = found
    of = "|min|", "|max|", "mean |x|", "std |x|"
    names = of if data.dtype.kind == "c" else ("min", "max", "mean", "std")
    named: dict[str, Any] = {}
    if nans + infinite < data.size:
        named = dict(zip(names, (least, greatest, mean, spread), strict=True))
    bad = dict(zip(_BAD, (int(nans), int(infinite)), strict=True))
    return named | {name: count for name, count in bad.items() if count}


def _corner(data: Any, dims: Sequence[Dimension]) -> Html:
    """Returns the first numbers along the last two dims, at the first positions of all others."""
    down, along = dims[-2] if len(dims) > 1 else None, dims[-1]
    cut = [0] * (len(dims) - 2) + [slice(_ROWS)] * (len(dims) > 1) + [slice(_COLUMNS)]
    few = np.atleast_2d(np.asarray(data[tuple(cut)]))
    lines = []
    for row in few:
        values = [tag("td", tag("code", _number(value))) for value in row]
        lines.append(tag("tr", values, tag("td", "…") if along.size > _COLUMNS else None))
    if down is not None and down.size > _ROWS:
        lines.append(tag("tr", tag("td", "⋮"), [tag("td") for _ in few[0][1:]]))
    words: list[Child] = [dim_chip(along.name)]
    if down is not None:
        words = [dim_chip(down.name), " down, ", *words, " along"]
    if len(dims) > 2:
        others = [dim_chip(dim.name) for dim in dims[:-2]]
        words += [tag("span", " at 0 of ", class_="quiet"), tag("span", others, class_="chips")]
    body = tag("table", tag("tbody", lines), class_="numbers")
    return tag("div", tag("p", words), tag("div", body, class_="scroll"))


def _number(value: Any) -> str:
    if not isinstance(value, int) and np.dtype(value.dtype).kind not in "biuc":
        value = float(value)
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    if isinstance(value, complex | np.complexfloating):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def where(x: NamedArray) -> list[Child]:
    """Returns where an array is: its layout, and what each device of its mesh holds."""
    layout = x.layout
    if layout is None:
        devices = sorted(getattr(x.data, "devices", set)(), key=lambda device: device.id)
        names = ", ".join(map(str, devices[:8])) + (", …" if len(devices) > 8 else "")
        text = f"on {names}" if devices else "in this process's memory, on no device"
        return [tag("p", text, class_="quiet")]
    on = x.data.sharding.mesh
    mesh = Mesh(tuple(on.shape.items()))
    local = layout.local(x.dims, mesh)
    size = local.volume * x.dtype.itemsize
    copies = mesh.size // mesh.extent(layout.split_axes)
    words = f", {copies:,} copies of each block" if copies > 1 else ""
    line = tag(
        "p",
        f"{layout} on {mesh}; a device holds ",
        dim_chips(x.dims, local),
        f" {show_bytes(size)}{words}",
    )
    ids = [device.id for device in on.devices.flat]
    return [line, tensor_grid(x.dims, layout, mesh, ids)]
