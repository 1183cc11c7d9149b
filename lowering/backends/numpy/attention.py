"""Attention by its definition, in float64: all scores at once."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.dims import Shape
from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine, align
from meshdsl.lowering.program import Instruction

_HIDDEN = -1e30


class _Attention:
    """The operands of one instruction: [devices, lead dims, rows, columns or features]."""

    def __init__(self, instruction: Instruction, inputs: Arrays) -> None:
        self.params = params = instruction.params
        self.sizes = sizes = AttentionSizes.of(instruction)
        self.shapes = [value.local for value in instruction.inputs]
        wide = [a.astype(np.float64) for a in inputs[:3]]
        self.q, self.k, self.v = wide
        self.full = Shape([*sizes.lead, sizes.rows, sizes.columns])
        count = 3 + len(params["given"])
        masks = [
            align(a, shape, self.full)
            for a, shape in zip(inputs[3:count], self.shapes[3:count], strict=True)
        ]
        self.masks = dict(zip(params["given"], masks, strict=True))
        names = [*self.full.names, *sizes.features_and_values().names]
        self.letter = dict(zip(names, string.ascii_letters, strict=False))

    def product(self, *pairs: Any, out: Shape) -> np.ndarray:
        """Returns an einsum of (array, shape) pairs."""
        words = ["Z" + "".join(self.letter[n] for n in shape.names) for _, shape in pairs]
        result = "Z" + "".join(self.letter[n] for n in out.names)
        arrays = [array for array, _ in pairs]
        return np.einsum(",".join(words) + "->" + result, *arrays, optimize=True)
