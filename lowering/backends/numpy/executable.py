"""Executables of programs on simulated devices: the reference for all other backends."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshdsl.lowering.backends.contract import no_memory_analysis
from meshdsl.lowering.backends.numpy.emitters import EMITTERS
from meshdsl.lowering.backends.numpy.machine import Machine
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.cuts import Cuts


class Executable:
    """A program ready to run on simulated devices."""

    def __init__(
        self, program: SpmdProgram, donated: Sequence[bool] = (), devices: Any = None
    ) -> None:
        self.program = program
        self.cuts: list[Cuts] = [()] * len(program.block.outputs)  # results are logical
        stage_axes = () if program.pipeline is None else program.pipeline.axes
        self._machine = Machine(program.mesh, EMITTERS, stage_axes)

    def as_text(self) -> str:
        """Returns the program itself: nothing is compiled."""
        return str(self.program)

    def memory_analysis(self) -> Any:
        """Raises ValueError: nothing is compiled."""
        no_memory_analysis("numpy")

    def call_flat(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Runs the program on global arrays and returns global arrays."""
        block, machine = self.program.block, self._machine
        inputs = [
            machine.shard(np.asarray(leaf), value)
            for leaf, value in zip(leaves, block.inputs, strict=True)
        ]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            outputs = machine.run(block, inputs)
        return [machine.join(a, v) for a, v in zip(outputs, block.outputs, strict=True)]
