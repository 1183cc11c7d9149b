"""Slices of one shard, with strides and dilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Window, parameters_of
from meshdsl.lowering.program import Instruction


def _window(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns positions start + i * stride of the operand after dilation; `fill` elsewhere."""
    (x,), params, (out,) = inputs, parameters_of(instruction, Window), instruction.outputs
    at = out.local.position(params["dim"])
    stride, dilation = params["stride"], params["dilation"]
    reach = (out.local[at].size - 1) * abs(stride)
    start = params["start"] - (reach if stride < 0 else 0)
    stop = start + reach + 1
    dilated = (x.shape[at] - 1) * dilation + 1
    if start < 0 or stop > dilated or dilation > 1:
        pads = [(0, 0, 0)] * x.ndim
        pads[at] = (-start, stop - dilated, dilation - 1)
        x = lax.pad(x, np.asarray(params["fill"]).astype(out.dtype), pads)
        start, stop = 0, reach + 1
    if (start, stop, abs(stride)) != (0, x.shape[at], 1):
        x = lax.slice_in_dim(x, start, stop, abs(stride), at)
    return lax.rev(x, (at,)) if stride < 0 else x


EMITTERS: Mapping[str, Emitter] = {"window": _window}
