"""Convolutions by their definition: windows are gathered, then multiplied with the filters."""

from __future__ import annotations

import string
from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.parameters import Convolve, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.slide import Slide


def windows_of(
    array: np.ndarray, at: int, slide: Slide, outs: int, windows: int, fill: float
) -> np.ndarray:
    """Returns the elements in each window: axis `at` becomes two, [outs, windows].

    Args:
        outs: the number of windows.
        windows: the size of a window.
        fill: the value of positions outside of the array, and between its elements.
    """
    o, w = np.arange(outs)[:, None], np.arange(windows)
    index, between = np.divmod(slide.stride * o + slide.dilation * w - slide.low, slide.base)
    inside = (between == 0) & (index >= 0) & (index < array.shape[at])
    elements = np.take(array, np.where(inside, index, 0), axis=at)
    mask = inside.reshape(*inside.shape, *(1,) * (array.ndim - at - 1))
    return np.where(mask, elements, np.asarray(fill, array.dtype))


def _equation(instruction: Instruction) -> str:
    """Returns the einsum equation; a dim that windows slide along has two letters."""
    (left, right), (out,) = (v.local for v in instruction.inputs), instruction.outputs
    pool = iter(string.ascii_letters)
    rows = next(pool)
    plain: dict[str, str] = {name: next(pool) for name in {*left.names, *right.names}}
    slid: list[dict[str, str]] = [{}, {}, {}]
    for slide in parameters_of(instruction, Convolve)["slides"]:
        position, window = next(pool), next(pool)
        slid[0][slide.x], slid[1][slide.window], slid[2][slide.out] = (
            position + window,
            window,
            position,
        )
    words = [
        rows + "".join({**plain, **slid_letters}[name] for name in shape.names)
        for shape, slid_letters in zip((left, right, out.local), slid, strict=True)
    ]
    return f"{words[0]},{words[1]}->{words[2]}"


def _convolve(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    x, filters = map(wide, inputs)
    (left, right), (out,) = (v.local for v in instruction.inputs), instruction.outputs
    slides = parameters_of(instruction, Convolve)["slides"]
    for slide in sorted(slides, key=lambda s: -left.position(s.x)):
        outs, windows = out.local.get(slide.out).size, right.get(slide.window).size
        x = windows_of(x, left.position(slide.x) + 1, slide, outs, windows, 0)
    return np.einsum(_equation(instruction), x, filters, optimize=True).astype(out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "convolve": _convolve,
}
