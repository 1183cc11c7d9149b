"""Programs on TPUs: one replica program, run by TensorFlow's TPUStrategy on every core.

What a call gives up and gets back under the same path, a training state, is held in variables: it
stays in the memory of the cores, and each call overwrites it there. Everything else goes in as
tensors and comes out as such.

Guarantees:
    A result that no call was given stays what it is: where another state takes its place, it is
    copied first. One that was given to a call can be read no more, also if the call fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.contract import no_memory_analysis
from meshdsl.lowering.backends.tf.hosts.cluster import Cluster
from meshdsl.lowering.backends.tf.namespace import tf_dtype
from meshdsl.lowering.backends.tf.placing import Devices, Shards, Storage
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.cuts import Cuts
from meshdsl.tensors.named_array import NamedArray

# (the device's number, its shards) -> the shards of the results
Replica = Callable[..., Sequence[tf.Tensor]]


class Held(Shards):
    """Shards in variables, until the program that they belong to runs again; or copies of them."""

    def __init__(self, storage: Storage, devices: Devices, owner: _Variable) -> None:
        self.storage = storage
        self.devices = devices
        self.owner = owner
        self.version = owner.version
        self._copies: list[tf.Tensor] = []
        owner.held = weakref.ref(self)

    def copy_out(self) -> None:
        """Copies the numbers out of the variables, which something else is to be put into."""
        self._copies = self.tensors

    @property
    def is_current(self) -> bool:
        """Whether the variables still hold these numbers."""
        return self.owner.version == self.version

    @property
    def tensors(self) -> list[tf.Tensor]:  # type: ignore[override]
        """The numbers of each device.

        Raises:
            ValueError: they have been given up.
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
    """A variable of every replica, which hold different numbers.

    Attributes:
        version: how often it has been overwritten.
        held: refers to the result that is in it, as long as anything does.
    """

    def __init__(self, strategy: Any, storage: Storage, sizes: tuple[int, ...]) -> None:
        self.strategy = strategy
        self.version = 0
        self.held: Callable[[], Held | None] = lambda: None
        with strategy.scope():
            self.variable = tf.Variable(
                tf.zeros(sizes, tf_dtype(storage.dtype)),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.NONE,
            )

    def overwrite(self, given: Sequence[Any]) -> None:
        """Lets the result in it be no longer so, with a copy of it unless it is given up.

        Args:
            given: what the call at hand is given that overwrites it.
        """
        held = self.held()
        if held is not None and held.is_current and not any(held is one for one in given):
            held.copy_out()
        self.version += 1

    def parts(self) -> Sequence[tf.Variable]:
        """Returns the variable of each replica."""
        return self.strategy.experimental_local_results(self.variable)


class Executable:
    """A program compiled for the replicas of a strategy, numbered as the mesh numbers devices.

    Args:
        donated: per input, whether it is given up.
        replica: the program of one device; it is called in a replica of the strategy.
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
        self._held = {
            number: _Variable(strategy, self.inputs[number], block.inputs[number].local.sizes)
            for number in self._carried(donated)
        }
        ends = {path: number for number, path in enumerate(program.output_paths)}
        self._ends = {ends[program.input_paths[n]]: held for n, held in self._held.items()}
        self._numbers = self._distributed([np.int32(n) for n in range(mesh.size)])
        self._step = tf.function(self._on_all(replica), autograph=False)
        self._assign = tf.function(self._assigning(), autograph=False)

    def _carried(self, donated: Sequence[bool]) -> list[int]:
        """Returns the inputs that are given up and come back as they went in."""
        ends = dict(zip(self.program.output_paths, self.outputs, strict=True))
        rows = zip(self.program.input_paths, self.inputs, donated, strict=False)
        return [n for n, (path, at, given) in enumerate(rows) if given and ends.get(path) == at]

    def _on_all(self, replica: Replica) -> Callable[..., Any]:
        """Returns the step of all replicas: of their numbers and the inputs without variables."""

        def of_one(device: tf.Tensor, *given: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(given)
            shards = [
                self._held[n].variable.read_value() if n in self._held else next(rest)
                for n in range(len(self.inputs))
            ]
            results = list(replica(device, *shards))
            for number, held in self._ends.items():
                held.variable.assign(results[number])
            return [result for n, result in enumerate(results) if n not in self._ends]

        return lambda *given: self.strategy.run(of_one, given)

    def _assigning(self) -> Callable[..., Any]:
        """Returns what puts numbers into some variables of every replica."""

        def assign(numbers: tuple[int, ...], *values: Any) -> None:
            def of_one(*values: tf.Tensor) -> None:
                for number, value in zip(numbers, values, strict=True):
                    self._held[number].variable.assign(value)

            self.strategy.run(of_one, values)

        return assign

    def call_flat(self, leaves: Sequence[Any]) -> list[Shards]:
        """Runs the program; arrays that are not where it takes them are put there."""
        given, given_up, moved = [], [], []
        for number, (leaf, stored) in enumerate(zip(leaves, self.inputs, strict=True)):
            held, data = self._held.get(number), getattr(leaf, "data", leaf)
            if held is None:
                given.append(self._distributed(self._shards(leaf, stored)))
                continue
            given_up.append(data)
            if not (isinstance(data, Held) and data.owner is held and data.is_current):
                moved.append((number, self._distributed(self._shards(leaf, stored))))
        for held in self._held.values():
            held.overwrite(given_up)
        if moved:
            self._assign(tuple(n for n, _ in moved), *(values for _, values in moved))
        found = iter(self._step(self._numbers, *given))
        results: list[Shards] = []
        for number, stored in enumerate(self.outputs):
            if number in self._ends:
                results.append(Held(stored, self.devices, self._ends[number]))
            else:
                tensors = self.strategy.experimental_local_results(next(found))
                results.append(Shards(stored, self.devices, tensors))
        return results

    def _shards(self, leaf: Any, stored: Storage) -> Sequence[Any]:
        data = leaf.data if isinstance(leaf, NamedArray) else leaf
        if isinstance(data, Shards) and (data.storage, data.devices) == (stored, self.devices):
            return data.tensors
        return stored.cut(leaf, range(len(self.devices.numbers)))

    def _distributed(self, shards: Sequence[Any]) -> Any:
        """Returns the value of every replica; equal shards are read once."""
        tensors = {id(shard): tf.convert_to_tensor(shard) for shard in shards}
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tensors[id(shards[context.replica_id_in_sync_group])]
        )

    @property
    def traces(self) -> dict[str, int]:
        """How often the step has been traced, and what puts a state into its variables."""
        functions = {"step": self._step, "assign": self._assign}
        return {name: f.experimental_get_tracing_count() for name, f in functions.items()}

    def memory_analysis(self) -> Any:
        """Refuses: TensorFlow keeps no account of a program's memory."""
        no_memory_analysis("tf")

    def as_text(self) -> str:
        """Returns the graph of one device."""
        from meshdsl.lowering.backends.tf.tpus.program import replica

        return str(replica(self.program).graph.as_graph_def())
