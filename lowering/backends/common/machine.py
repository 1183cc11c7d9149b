"""The base of all machines: a mesh, the emitters, and the functions of a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.common.namespace import Namespace, OneDevice
from meshdsl.lowering.backends.contract import Emitter
from meshdsl.lowering.backends.missing import emitter_of
from meshdsl.lowering.program import Instruction, Value


@dataclass(frozen=True)
class BaseMachine(ABC):
    """Emits the instructions of one device of a mesh, or of all devices.

    Attributes:
        backend: the backend's name, for messages.
        xp: the framework's functions.
        emitters: one for each kind of instruction.
    """

    backend: ClassVar[str]
    xp: ClassVar[Namespace]

    mesh: Mesh
    emitters: Mapping[str, Emitter]

    def emitter(self, instruction: Instruction) -> Emitter:
        """Returns the emitter of an instruction."""
        return emitter_of(self.emitters, instruction, self.backend)

    def counts(self, axes: Sequence[str]) -> list[int]:
        """Returns the sizes of some axes."""
        return [self.mesh.sizes[axis] for axis in axes]

    def sizes(self, value: Value) -> tuple[int, ...]:
        """Returns the shape of the array that stands for a value."""
        return value.local.sizes

    def product(self, equation: str, factors: Sequence[Any], dtype: np.dtype) -> Any:
        """Returns an einsum of arrays in a dtype."""
        return self.xp.einsum(equation, factors, dtype)

    @abstractmethod
    def index(self, axes: Sequence[str]) -> Any:
        """Returns a device's index along some axes, major first: an s32 scalar."""


class OneDeviceMachine(BaseMachine):
    """Emits the instructions of one device; its arrays are that device's shards."""

    xp: ClassVar[OneDevice]
