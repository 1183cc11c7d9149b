"""Elementwise instructions: numpy and SciPy on aligned dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from meshdsl.lowering.backends.arrange import NUMPY_NAMES
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, align, wide
from meshdsl.lowering.program import Instruction


def _elementwise(function: Callable[..., np.ndarray]) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        (out,) = instruction.outputs
        aligned = [
            align(a, v.local, out.local) for a, v in zip(inputs, instruction.inputs, strict=True)
        ]
        result = np.asarray(function(*aligned)).astype(out.dtype)
        return np.broadcast_to(result, (machine.mesh.size, *out.local.sizes))

    return emit


EMITTERS: Mapping[str, Emitter] = {
    **{name: _elementwise(getattr(np, name)) for name in NUMPY_NAMES},
    "round": _elementwise(np.rint),
    "rsqrt": _elementwise(lambda x: (1 / np.sqrt(x)).astype(x.dtype)),
    "sigmoid": _elementwise(lambda x: special.expit(wide(x))),
    "erf": _elementwise(lambda x: special.erf(wide(x))),
    "shift_right": lambda machine, instruction, inputs: (
        inputs[0] >> inputs[0].dtype.type(instruction.params["places"])
    ),
    "select": _elementwise(np.where),
    "cast": _elementwise(lambda x: x),
}
