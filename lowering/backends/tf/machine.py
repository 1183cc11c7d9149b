"""Machine: emits blocks of a program as TensorFlow operations on one device's tensors.

A program is emitted once, for all devices. Values that differ between devices are computed from
`device`, a tensor with the number of the device that runs the program. `links` connects devices.
There are two kinds: TensorFlow's collectives between hosts, and those of TPUs.
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
    """The collectives between the devices of a mesh; all devices call the same methods.

    Rows belong to the devices along some axes, major first.

    Attributes:
        compiled: whether XLA compiles the program.
    """

    compiled: ClassVar[bool]

    def packed(self, op: str) -> float:
        """Returns the bytes up to which tensors of one collective are packed into one buffer."""

    def begin(self, number: int) -> list[tf.Operation]:
        """Records that a collective begins, by its number; records are made in order."""

    def end(self, number: int) -> list[tf.Operation]:
        """Records that a collective has ended."""

    def in_order(self) -> list[tf.Operation]:
        """Records nothing, but runs in the order of the records."""

    def reduce(self, x: tf.Tensor, axes: Sequence[str], kind: str) -> tf.Tensor:
        """Returns the sum, max or min of x over the devices along some axes."""

    def scatter(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """Returns this device's row of the sum of the rows [devices, ...] of all devices."""

    def gather(self, x: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """Returns the x of all devices along some axes: [devices, ...]."""

    def exchange(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """Returns the rows for this device, from the rows [devices, ...] of all devices."""

    def permute(self, x: tf.Tensor, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
        """Returns the x of this device's source in `pairs` (source, target); zeros without one."""

    def barrier(self, values: Arrays) -> Arrays:
        """Returns the values; none is used before all are computed."""


@dataclass(frozen=True)
class Machine(OneDeviceMachine):
    """Emits the instructions of one device of a mesh.

    Attributes:
        device: the device's number in the mesh, an s32 scalar.
        instructions: all instructions emitted so far.
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
            for position, device in enumerate(group):
                table[device] = position
        return self.own_entry(table)

    def own_entry(self, table: Sequence[int]) -> tf.Tensor:
        """Returns this device's entry of a table with one for each device: an s32 scalar."""
        if len(set(table)) == 1:
            return tf.constant(table[0], tf.int32)
        if list(table) == list(range(len(table))):
            return self.device
        return tf.gather(tf.constant(table, tf.int32), self.device)

    def run(self, block: Block, inputs: Arrays) -> list[tf.Tensor]:
        """Emits a block on one device's tensors."""
        tensors: dict[Value, tf.Tensor] = dict(zip(block.inputs, inputs, strict=True))
        for instruction in block.instructions:
            arguments = [tensors[v] for v in instruction.inputs]
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
                tensors[value] = result
        return [tensors[v] for v in block.outputs]

    def _collective(self, instruction: Instruction, number: int, arguments: Arrays) -> Any:
        """Emits a collective, with records of its begin and its end."""
        # It begins only when its operands are computed: time to compute them is not its own.
        with tf.control_dependencies(arguments):
            self.links.begin(number)
        results = self.emitter(instruction)(self, instruction, arguments)
        self.links.end(number)
        return results

    def _in_order(self, instruction: Instruction, arguments: Arrays) -> Any:
        """Emits an effect: it runs after all earlier records, and before all later ones."""
        with tf.control_dependencies(self.links.in_order()):
            result = self.emitter(instruction)(self, instruction, arguments)
        with tf.control_dependencies([result]):
            self.links.in_order()
        return result
