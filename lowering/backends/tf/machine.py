"""Machine: emits blocks of a program as TensorFlow operations on one device's tensors.

A program is emitted once, for all devices: what differs between them follows from `device`, the
number of the device that runs it, which is a tensor. How devices reach each other is `links`, of
which there are two kinds: TensorFlow's collectives between hosts, and those of TPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from meshdsl.lowering.backends.common.machine import OneDeviceMachine
from meshdsl.lowering.backends.common.namespace import OneDevice
from meshdsl.lowering.backends.tf import namespace
from meshdsl.lowering.backends.tf.namespace import tf_dtype
from meshdsl.lowering.program import EFFECTS, Block, Instruction, Value

Arrays = Sequence[tf.Tensor]
Emitter = Callable[["Machine", Instruction, Arrays], Any]


class Links(Protocol):
    """How the devices of a mesh reach each other; each method is called by all of them.

    Rows are for the devices along some axes, in their order, major first.

    Attributes:
        compiled: whether XLA compiles the program as a whole.
    """

    compiled: ClassVar[bool]

    def packed(self, op: str) -> float:
        """Returns the bytes up to which tensors of one collective travel in one buffer."""

    def begin(self, number: int) -> list[tf.Operation]:
        """Notes that a collective begins, by its number; what notes it is done in order."""

    def end(self, number: int) -> list[tf.Operation]:
        """Notes that it has ended."""

    def in_order(self) -> list[tf.Operation]:
        """Notes nothing, but in the order of what is noted."""

    def reduce(self, x: tf.Tensor, axes: Sequence[str], kind: str) -> tf.Tensor:
        """Returns the sum, max or min of the x of all devices along some axes."""

    def scatter(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """Returns this device's row of the sum of the rows [devices, ...] of all devices."""

    def gather(self, x: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """Returns the x of all devices along some axes: [devices, ...]."""

    def exchange(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """Returns, of the rows [devices, ...] of every device, those that are for this one."""

    def permute(self, x: tf.Tensor, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
        """Returns the x of the device that is paired with this one as its source, or zeros."""

    def barrier(self, values: Arrays) -> Arrays:
        """Returns the values; none of them may be used before all of them are there."""


@dataclass(frozen=True)
class Machine(OneDeviceMachine):
    """One device of a mesh.

    Attributes:
        device: its number in the mesh, an s32 scalar.
        instructions: what has been emitted.
    """

    backend = "tf"
    xp: ClassVar[OneDevice] = namespace

    links: Links
    device: tf.Tensor
    instructions: list[Instruction] = field(default_factory=list)

    def index(self, axes: Sequence[str]) -> tf.Tensor:
        """Returns this device's index along some axes, major first: an s32 scalar."""
        table = [0] * self.mesh.size
        for group in self.mesh.groups(*axes):
            for place, device in enumerate(group):
                table[device] = place
        return self.own(table)

    def own(self, table: Sequence[int]) -> tf.Tensor:
        """Returns this device's entry of a table of whole numbers, one for each: an s32 scalar."""
        if len(set(table)) == 1:
            return tf.constant(table[0], tf.int32)
        if list(table) == list(range(len(table))):
            return self.device
        return tf.gather(tf.constant(table, tf.int32), self.device)

    def run(self, block: Block, inputs: Arrays) -> list[tf.Tensor]:
        """Emits a block on one device's tensors."""
        held: dict[Value, tf.Tensor] = dict(zip(block.inputs, inputs, strict=True))
        for instruction in block.instructions:
            arguments = [held[v] for v in instruction.inputs]
            number = len(self.instructions)
            self.instructions.append(instruction)
            with tf.name_scope(f"{instruction.op}.{number}"):
                if instruction.op in EFFECTS:
                    results = self._in_order(instruction, arguments)
                elif instruction.is_collective:
                    results = self._collective(instruction, number, arguments)
                else:
                    results = self.emitter(instruction)(self, instruction, arguments)
            if isinstance(results, tf.Tensor):
                results = (results,)
            for value, result in zip(instruction.outputs, results, strict=True):
                sizes = value.local.sizes
                assert result.shape == sizes, (instruction.op, result.shape, sizes)
                assert result.dtype == tf_dtype(value.dtype), (instruction.op, result.dtype)
                held[value] = result
        return [held[v] for v in block.outputs]

    def _collective(self, instruction: Instruction, number: int, arguments: Arrays) -> Any:
        """Emits a collective, noted from when there is what it sends until it has sent it."""
        with tf.control_dependencies(arguments):
            self.links.begin(number)
        results = self.emitter(instruction)(self, instruction, arguments)
        self.links.end(number)
        return results

    def _in_order(self, instruction: Instruction, arguments: Arrays) -> Any:
        """Emits what must happen after all that was noted before, and before what comes next."""
        with tf.control_dependencies(self.links.in_order()):
            result = self.emitter(instruction)(self, instruction, arguments)
        with tf.control_dependencies([result]):
            self.links.in_order()
        return result
