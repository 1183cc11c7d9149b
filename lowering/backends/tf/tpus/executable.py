"""Executables on TPUs: TensorFlow's TPUStrategy runs one replica program on every core.

A donated argument that a call returns under the same path, such as a training state, is stored in
variables: it stays in the memory of the cores, and each call overwrites it there. All other
arguments and results are tensors.

Guarantees:
    A result that is not donated does not change: it is copied before another state overwrites its
    variables. A result that is donated to a call can no longer be read, also if the call fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.contract import no_memory_analysis
from meshdsl.lowering.backends.tf.arguments import Devices, Shards, Storage
from meshdsl.lowering.backends.tf.hosts.cluster import Cluster
from meshdsl.lowering.backends.tf.namespace import tf_dtype
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.cuts import Cuts
from meshdsl.tensors.named_array import NamedArray

# (the device's number, its shards) -> the shards of the results
Replica = Callable[..., Sequence[tf.Tensor]]


class VariableShards(Shards):
    """Shards in a program's variables, until it runs again; then copies, unless donated."""

    def __init__(self, storage: Storage, devices: Devices, owner: _Variable) -> None:
        self.storage = storage
        self.devices = devices
        self.owner = owner
        self.version = owner.version
        self._copies: list[tf.Tensor] = []
        owner.shards = weakref.ref(self)

    def copy_out(self) -> None:
        """Copies the numbers out of the variables, before these are overwritten."""
        self._copies = self.tensors

    @property
    def is_current(self) -> bool:
        """Whether the variables still have these numbers."""
        return self.owner.version == self.version

    @property
    def tensors(self) -> list[tf.Tensor]:  # type: ignore[override]
        """The numbers of each device.

        Raises:
            ValueError: they have been donated.
        """
        if self._copies:
            return self._copies
        if not self.is_current:
            raise ValueError(
                f"{self!r} was donated to a call, which has put its own result in its place; use "
                "that, or leave out `donate`"
            )
        return [variable.read_value() for variable in self.owner.parts()]


class _Variable:
    """A variable on every replica, each with numbers of its own.

    Attributes:
        version: how often it has been overwritten.
        shards: a weak reference to the result that is in it.
    """

    def __init__(self, strategy: Any, storage: Storage, sizes: tuple[int, ...]) -> None:
        self.strategy = strategy
        self.version = 0
        self.shards: Callable[[], VariableShards | None] = lambda: None
        with strategy.scope():
            self.variable = tf.Variable(
                tf.zeros(sizes, tf_dtype(storage.dtype)),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.NONE,
            )

    def overwrite(self, donated: Sequence[Any]) -> None:
        """Marks the variable as overwritten; its result is copied first unless it is donated.

        Args:
            donated: the data of the arguments that the current call overwrites.
        """
        shards = self.shards()
        if shards is not None and shards.is_current and not any(shards is d for d in donated):
            shards.copy_out()
        self.version += 1

    def parts(self) -> Sequence[tf.Variable]:
        """Returns the variable of each replica."""
        return self.strategy.experimental_local_results(self.variable)


class Executable:
    """A program compiled for the replicas of a strategy, numbered as the mesh numbers devices.

    Args:
        donated: per input, whether a call may overwrite it.
        replica: the program of one device; it runs in a replica of the strategy.
    """

    def __init__(
        self, program: SpmdProgram, donated: Sequence[bool], strategy: Any, replica: Replica
    ) -> None:
        self.program = program
        self.strategy = strategy
        block, mesh = program.block, program.mesh
        self.devices = Devices(("TPU",) * mesh.size, tuple(range(mesh.size)), Cluster())
        self.inputs = [Storage.of(value, mesh) for value in block.inputs]
        self.outputs = [Storage.of(value, mesh) for value in block.outputs]
        self.cuts: list[Cuts] = [stored.cuts for stored in self.outputs]
        self._variables = {
            number: _Variable(strategy, self.inputs[number], block.inputs[number].local.sizes)
            for number in self._carried(donated)
        }
        outputs = {path: number for number, path in enumerate(program.output_paths)}
        self._variable_outputs = {
            outputs[program.input_paths[n]]: variable for n, variable in self._variables.items()
        }
        self._numbers = self._distributed([np.int32(n) for n in range(mesh.size)])
        self._step = tf.function(self._on_all(replica), autograph=False)
        self._assign = tf.function(self._assigning(), autograph=False)

    def _carried(self, donated: Sequence[bool]) -> list[int]:
        """Returns the donated inputs that have an output with the same path and storage."""
        outputs = dict(zip(self.program.output_paths, self.outputs, strict=True))
        rows = zip(self.program.input_paths, self.inputs, donated, strict=False)
        return [
            n
            for n, (path, stored, is_donated) in enumerate(rows)
            if is_donated and outputs.get(path) == stored
        ]

    def _on_all(self, replica: Replica) -> Callable[..., Any]:
        """Returns the step of all replicas, a function of their numbers and the other inputs."""

        def of_one(device: tf.Tensor, *inputs: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(inputs)
            shards = [
                self._variables[n].variable.read_value() if n in self._variables else next(rest)
                for n in range(len(self.inputs))
            ]
            results = list(replica(device, *shards))
            for number, variable in self._variable_outputs.items():
                variable.variable.assign(results[number])
            return [result for n, result in enumerate(results) if n not in self._variable_outputs]

        return lambda *inputs: self.strategy.run(of_one, inputs)

    def _assigning(self) -> Callable[..., Any]:
        """Returns a function that assigns values to some variables of every replica."""

        def assign(numbers: tuple[int, ...], *values: Any) -> None:
            def of_one(*values: tf.Tensor) -> None:
                for number, value in zip(numbers, values, strict=True):
                    self._variables[number].variable.assign(value)

            self.strategy.run(of_one, values)

        return assign

    def call_flat(self, leaves: Sequence[Any]) -> list[Shards]:
        """Runs the program; arrays that are stored elsewhere are transferred."""
        inputs, donated, moved = [], [], []
        for number, (leaf, stored) in enumerate(zip(leaves, self.inputs, strict=True)):
            variable, data = self._variables.get(number), getattr(leaf, "data", leaf)
            if variable is None:
                inputs.append(self._distributed(self._shards(leaf, stored)))
                continue
            donated.append(data)
            if not (
                isinstance(data, VariableShards) and data.owner is variable and data.is_current
            ):
                moved.append((number, self._distributed(self._shards(leaf, stored))))
        for variable in self._variables.values():
            variable.overwrite(donated)
        if moved:
            self._assign(tuple(n for n, _ in moved), *(values for _, values in moved))
        tensor_results = iter(self._step(self._numbers, *inputs))
        results: list[Shards] = []
        for number, stored in enumerate(self.outputs):
            if number in self._variable_outputs:
                results.append(VariableShards(stored, self.devices, self._variable_outputs[number]))
            else:
                tensors = self.strategy.experimental_local_results(next(tensor_results))
                results.append(Shards(stored, self.devices, tensors))
        return results

    def _shards(self, leaf: Any, stored: Storage) -> Sequence[Any]:
        """Returns the shards of an array for all devices."""
        data = leaf.data if isinstance(leaf, NamedArray) else leaf
        if isinstance(data, Shards) and (data.storage, data.devices) == (stored, self.devices):
            return data.tensors
        return stored.shards(leaf, range(len(self.devices.numbers)))

    def _distributed(self, shards: Sequence[Any]) -> Any:
        """Returns shards as a value of every replica; a replica's shard is converted once."""
        tensors = {id(shard): tf.convert_to_tensor(shard) for shard in shards}
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tensors[id(shards[context.replica_id_in_sync_group])]
        )

    @property
    def traces(self) -> dict[str, int]:
        """How often the step and the assignment of variables have been traced."""
        functions = {"step": self._step, "assign": self._assign}
        return {name: f.experimental_get_tracing_count() for name, f in functions.items()}

    def memory_analysis(self) -> Any:
        """Raises ValueError: TensorFlow has no analysis of a program's memory."""
        no_memory_analysis("tf")

    def as_text(self) -> str:
        """Returns the graph of one device, as text."""
        from meshdsl.lowering.backends.tf.tpus.program import replica

        return str(replica(self.program).graph.as_graph_def())
