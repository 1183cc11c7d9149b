"""Programs on host devices: one function that runs the program of a replica on every device.

The program is traced once, for all devices (see `machine`), and so a graph is as large on a
thousand devices as on one. It is not inlined: TensorFlow tells apart what a loop sends in its
iterations by a name that would then differ between devices, which would never find each other.
For the same reason a program that sends in loops runs unoptimized (see `host_optimizer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.contract import no_memory_analysis
from meshdsl.lowering.backends.tf.emit import run, specs
from meshdsl.lowering.backends.tf.failures import told
from meshdsl.lowering.backends.tf.host_optimizer import collects_in_bodies, unoptimized
from meshdsl.lowering.backends.tf.hosts.devices import host_devices, timeout
from meshdsl.lowering.backends.tf.hosts.keys import instance_keys
from meshdsl.lowering.backends.tf.hosts.links import HostLinks
from meshdsl.lowering.backends.tf.hosts.order import check_order
from meshdsl.lowering.backends.tf.hosts.tokens import read, reset, tokens
from meshdsl.lowering.backends.tf.hosts.watchdog import watched
from meshdsl.lowering.backends.tf.placing import Shards, Storage
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import Instruction, SpmdProgram
from meshdsl.tensors.cuts import Cuts


class Executable:
    """A program compiled for the devices of its mesh.

    Args:
        donated: TensorFlow reuses no buffers of host tensors, so nothing comes of it.

    Raises:
        ValueError: the mesh needs more devices than there are.
    """

    def __init__(
        self, program: SpmdProgram, donated: Sequence[bool] = (), devices: Any = None
    ) -> None:
        self.program = program
        block, mesh = program.block, program.mesh
        self.devices = devices or host_devices(mesh)
        self.inputs = [Storage.of(value, mesh) for value in block.inputs]
        self.outputs = [Storage.of(value, mesh) for value in block.outputs]
        self.cuts: list[Cuts] = [stored.cuts for stored in self.outputs]
        self._timeout = timeout()
        self.instructions: list[Instruction] = []
        self.tokens = tokens(self.devices.names)
        self.replica = self._of_replica()
        collectives = [one for one in self.instructions if one.is_collective]
        self._collects = bool(collectives)
        self._collects_in_bodies = collects_in_bodies(block)
        ordered = [axes_of(one) for one in collectives if one.op != "permute"]
        self._groups = list(dict.fromkeys(ordered))
        self._step = self._of_all_devices()

    def _of_replica(self) -> Any:
        """Returns the program of one device, as a concrete function of its number and shards."""
        program, names = self.program, self.devices.everywhere

        def replica(device: tf.Tensor, token: tf.Tensor, *shards: tf.Tensor) -> list[tf.Tensor]:
            keys = instance_keys(program, names)
            links = HostLinks(program.mesh, device, token, names, keys)
            results = run(program, links, device, shards, self.instructions)
            return results or [tf.identity(device)]  # what has no result would not be run

        signature = [tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)]
        function = tf.function(
            replica,
            input_signature=[*signature, *specs(program.block.inputs)],
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
        return function.get_concrete_function()

    def _of_all_devices(self) -> Any:
        """Returns a function of the shards of all inputs, those of a device in a row.

        A tf.function would send its results on to the first device; where one fails, it would tell
        of what it could not send, instead of why.
        """
        devices, count = self.devices, len(self.inputs)

        def step(*shards: tf.Tensor) -> list[tf.Tensor]:
            found: list[tf.Tensor] = []
            for place, (name, number) in enumerate(
                zip(devices.names, devices.numbers, strict=True)
            ):
                own = shards[place * count : (place + 1) * count]
                with tf.device(name):
                    results = self.replica(
                        tf.constant(number, tf.int32), self.tokens[place].handle, *own
                    )
                    found += map(tf.identity, results)
            return found

        signature = specs(self.program.block.inputs) * len(devices.names)
        with unoptimized():  # lowering has left little to improve, and looking takes longer
            return tf.compat.v1.wrap_function(step, signature, name=self.program.name or "step")

    def call_flat(self, leaves: Sequence[Any]) -> list[Shards]:
        """Runs the program; arrays that are not stored as it takes them are put there."""
        placed = [
            stored.put(leaf, self.devices) for leaf, stored in zip(leaves, self.inputs, strict=True)
        ]
        found = self._run([shard for row in zip(*placed, strict=True) for shard in row])
        count = len(self.outputs)
        return [
            Shards(stored, self.devices, found[place::count])
            for place, stored in enumerate(self.outputs)
        ]

    def _run(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the program on the shards of all devices; with collectives, alone."""
        alone = watched(self.tokens, self._timeout) if self._collects else contextlib.nullcontext()
        written = unoptimized() if self._collects_in_bodies else contextlib.nullcontext()
        with alone as call, written:
            try:
                if len(self.devices.names) > 1 and "GPU" in self.devices.names[0]:
                    check_order(self.devices, self.program.mesh, self._groups)
                return self._step(*shards)
            except tf.errors.OpError as error:
                held, ended = read(self.tokens), call is not None and call.ended
                reset(self.tokens)
                told(error, self.program.mesh, self.instructions, held, self.devices, ended)
                raise

    def memory_analysis(self) -> Any:
        """Refuses: TensorFlow keeps no account of a program's memory."""
        no_memory_analysis("tf")

    def as_text(self) -> str:
        """Returns the graph of one device."""
        return str(self.replica.graph.as_graph_def())
