"""Windows of one shard: every element by itself, as the definition says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Window, parameters_of
from meshdsl.lowering.program import Instruction


def _window(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    params, (out,) = parameters_of(instruction, Window), instruction.outputs
    at = out.local.position(params["dim"]) + 1
    rows = np.moveaxis(inputs[0], at, 0)
    wanted = params["start"] + params["stride"] * np.arange(out.local[at - 1].size)
    source, between = np.divmod(wanted, params["dilation"])
    found = (between == 0) & (source >= 0) & (source < len(rows))
    result = np.full((len(wanted), *rows.shape[1:]), params["fill"], out.dtype)
    result[found] = rows[source[found]]
    return np.moveaxis(result, 0, at)


EMITTERS: Mapping[str, Emitter] = {"window": _window}
