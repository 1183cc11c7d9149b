"""Slices of one shard, with strides and dilation: element by element, by the definition."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Window, parameters_of
from meshdsl.lowering.program import Instruction


def _window(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns positions start + i * stride of the operand after dilation; `fill` elsewhere."""
    params, (out,) = parameters_of(instruction, Window), instruction.outputs
    at = out.local.position(params["dim"]) + 1
    rows = np.moveaxis(inputs[0], at, 0)
    positions = params["start"] + params["stride"] * np.arange(out.local[at - 1].size)
    source, between = np.divmod(positions, params["dilation"])
    inside = (between == 0) & (source >= 0) & (source < len(rows))
    result = np.full((len(positions), *rows.shape[1:]), params["fill"], out.dtype)
    result[inside] = rows[source[inside]]
    return np.moveaxis(result, 0, at)


EMITTERS: Mapping[str, Emitter] = {"window": _window}
