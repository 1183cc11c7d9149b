"""Executables on host devices: one function runs the program of a replica on every device.

The program is traced once, for all devices (see `machine`), so a graph for a thousand devices is as
large as for one. The replica's function is not inlined. TensorFlow tells the collectives of a
loop's iterations apart by a name. Inlining would make that name differ between devices, and these
would never find each other. For the same reason a program with collectives in loops runs
unoptimized (see `host_optimizer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.contract import no_memory_analysis
from meshdsl.lowering.backends.tf.arguments import Shards, Storage
from meshdsl.lowering.backends.tf.emit import run, specs
from meshdsl.lowering.backends.tf.failures import explain_failure
from meshdsl.lowering.backends.tf.host_optimizer import collects_in_bodies, unoptimized
from meshdsl.lowering.backends.tf.hosts.devices import host_devices, timeout
from meshdsl.lowering.backends.tf.hosts.keys import instance_keys
from meshdsl.lowering.backends.tf.hosts.links import HostLinks
from meshdsl.lowering.backends.tf.hosts.order import check_order
from meshdsl.lowering.backends.tf.hosts.tokens import read, reset, tokens
from meshdsl.lowering.backends.tf.hosts.watchdog import watched
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import Instruction, SpmdProgram
from meshdsl.tensors.cuts import Cuts


class Executable:
    """A program compiled for the devices of its mesh.

    Args:
        donated: ignored; TensorFlow does not reuse the buffers of host tensors.

    Raises:
        ValueError: the mesh needs more devices than the machine has.
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
        self.replica = self._replica_function()
        collectives = [i for i in self.instructions if i.is_collective]
        self._collects = bool(collectives)
        self._collects_in_bodies = collects_in_bodies(block)
        ordered = [axes_of(i) for i in collectives if i.op != "permute"]
        self._groups = list(dict.fromkeys(ordered))
        self._step = self._step_function()

    def _replica_function(self) -> Any:
        """Returns the program of one device, as a concrete function of its number and shards."""
        program, names = self.program, self.devices.everywhere

        def replica(device: tf.Tensor, token: tf.Tensor, *shards: tf.Tensor) -> list[tf.Tensor]:
            keys = instance_keys(program, names)
            links = HostLinks(program.mesh, device, token, names, keys)
            results = run(program, links, device, shards, self.instructions)
            return results or [tf.identity(device)]  # a function without results would not run

        signature = [tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)]
        function = tf.function(
            replica,
            input_signature=[*signature, *specs(program.block.inputs)],
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
        return function.get_concrete_function()

    def _step_function(self) -> Any:
        """Returns a function of the shards of all inputs on all devices, device by device."""
        # A tf.function would send its results to the first device. If a device failed, the error
        # would be about the results that could not be sent, and not about the cause.
        devices, count = self.devices, len(self.inputs)

        def step(*shards: tf.Tensor) -> list[tf.Tensor]:
            outputs: list[tf.Tensor] = []
            for index, (name, number) in enumerate(
                zip(devices.names, devices.numbers, strict=True)
            ):
                device_shards = shards[index * count : (index + 1) * count]
                with tf.device(name):
                    results = self.replica(
                        tf.constant(number, tf.int32), self.tokens[index].handle, *device_shards
                    )
                    outputs += map(tf.identity, results)
            return outputs

        signature = specs(self.program.block.inputs) * len(devices.names)
        with unoptimized():  # lowering leaves little to improve, and the optimizer costs more time
            return tf.compat.v1.wrap_function(step, signature, name=self.program.name or "step")

    def call_flat(self, leaves: Sequence[Any]) -> list[Shards]:
        """Runs the program; arrays that are stored in another form are converted."""
        placed = [
            stored.put(leaf, self.devices) for leaf, stored in zip(leaves, self.inputs, strict=True)
        ]
        outputs = self._run([shard for row in zip(*placed, strict=True) for shard in row])
        count = len(self.outputs)
        return [
            Shards(stored, self.devices, outputs[index::count])
            for index, stored in enumerate(self.outputs)
        ]

    def _run(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the program on the shards of all devices; one with collectives runs alone."""
        watch = watched(self.tokens, self._timeout) if self._collects else contextlib.nullcontext()
        optimizer = unoptimized() if self._collects_in_bodies else contextlib.nullcontext()
        with watch as call, optimizer:
            try:
                if len(self.devices.names) > 1 and "GPU" in self.devices.names[0]:
                    check_order(self.devices, self.program.mesh, self._groups)
                return self._step(*shards)
            except tf.errors.OpError as error:
                at, timed_out = read(self.tokens), call is not None and call.timed_out
                reset(self.tokens)
                explain_failure(
                    error, self.program.mesh, self.instructions, at, self.devices, timed_out
                )
                raise

    def memory_analysis(self) -> Any:
        """Raises ValueError: TensorFlow has no analysis of a program's memory."""
        no_memory_analysis("tf")

    def as_text(self) -> str:
        """Returns the graph of one device, as text."""
        return str(self.replica.graph.as_graph_def())
