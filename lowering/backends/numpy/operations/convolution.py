"""Products with sliding windows, read from their definition: every element a window meets."""

from __future__ import annotations

import string
from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.parameters import Convolve, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.slide import Slide


def met(
    array: np.ndarray, at: int, slide: Slide, outs: int, windows: int, fill: float
) -> np.ndarray:
    """Replaces position `at` by two: what each window meets, for each of its positions."""
    o, w = np.arange(outs)[:, None], np.arange(windows)
    element, between = np.divmod(slide.stride * o + slide.dilation * w - slide.low, slide.base)
    inside = (between == 0) & (element >= 0) & (element < array.shape[at])
    found = np.take(array, np.where(inside, element, 0), axis=at)
    mask = inside.reshape(*inside.shape, *(1,) * (array.ndim - at - 1))
    return np.where(mask, found, np.asarray(fill, array.dtype))


def _letters(instruction: Instruction) -> str:
    """Returns the equation of the product, in which a dim met through windows has two letters."""
    (left, right), (out,) = (v.local for v in instruction.inputs), instruction.outputs
    pool = iter(string.ascii_letters)
    rows = next(pool)
    plain: dict[str, str] = {name: next(pool) for name in {*left.names, *right.names}}
    slid: list[dict[str, str]] = [{}, {}, {}]
    for slide in parameters_of(instruction, Convolve)["slides"]:
        place, window = next(pool), next(pool)
        slid[0][slide.x], slid[1][slide.window], slid[2][slide.out] = place + window, window, place
    words = [
        rows + "".join({**plain, **own}[name] for name in shape.names)
        for shape, own in zip((left, right, out.local), slid, strict=True)
    ]
    return f"{words[0]},{words[1]}->{words[2]}"


def _convolve(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    x, filters = map(wide, inputs)
    (left, right), (out,) = (v.local for v in instruction.inputs), instruction.outputs
    slides = parameters_of(instruction, Convolve)["slides"]
    for slide in sorted(slides, key=lambda s: -left.position(s.x)):
        outs, windows = out.local.get(slide.out).size, right.get(slide.window).size
        x = met(x, left.position(slide.x) + 1, slide, outs, windows, 0)
    return np.einsum(_letters(instruction), x, filters, optimize=True).astype(out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "convolve": _convolve,
}
