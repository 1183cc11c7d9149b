"""Counter-based random bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.numpy import namespace as xp
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.threefry import threefry2x32
from meshdsl.lowering.parameters import RandomBits, parameters_of
from meshdsl.lowering.program import Instruction


def _threefry(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns random words of a key for each counter (high, low): pairs, or their xor."""
    key, high, low = inputs
    shape = instruction.outputs[0].local.without(["random_key"])
    high, low = (
        align(xp, a, v.local, shape)
        for a, v in zip((high, low), instruction.inputs[1:], strict=True)
    )
    own = instruction.inputs[0].local.without(["random_key"])
    words = [align(xp, key[..., i], own, shape) for i in (0, 1)]
    full = (machine.mesh.size, *shape.sizes)
    high, low = np.broadcast_to(high, full), np.broadcast_to(low, full)
    first, second = threefry2x32(words[0], words[1], high, low)
    pairs = parameters_of(instruction, RandomBits)["pairs"]
    return np.stack([first, second], -1) if pairs else first ^ second


EMITTERS: Mapping[str, Emitter] = {
    "threefry2x32": _threefry,
}
