"""Who holds the state of a training step: which lost hosts it survives without a checkpoint.

The state is what goes in and comes out under the same path: parameters, optimizer, step. Random
numbers follow from the seed and the step, and every process knows its place in the data, so these
two are on every host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshdsl.layouts.hosts import Domains, Survival, survival
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.program import SpmdProgram, Value

ON_EVERY_HOST = ("random numbers", "position in the data")


@dataclass(frozen=True)
class State:
    """Tensors of one kind that are split over the same axes, such as the means of Adam.

    Attributes:
        splits: which of their dims are split over which axes, the most frequent first.
        replicas: the axes along which devices have copies; empty: each shard has one holder.
        shards: into how many parts a tensor is split.
        copies: devices that have the same shard.
        bytes: those of all these tensors on one device.
        hosts: what of them survives lost hosts.
        slices: what survives lost slices; None: there is one slice.
        bytes_of_host: those of the shards on one host, copies not counted.
    """

    name: str
    tensors: int
    splits: tuple[str, ...]
    axes: frozenset[str]
    replicas: tuple[str, ...]
    shards: int
    copies: int
    bytes: int
    hosts: Survival
    slices: Survival | None
    bytes_of_host: int


@dataclass(frozen=True)
class Failures:
    """What a training step loses with hosts and slices.

    Attributes:
        together: what of the whole state survives lost hosts.
        slices: what survives lost slices; None: there is one slice.
        bytes_of_host: what one host receives when it comes back.
        bytes_of_slice: what one slice receives.
    """

    name: str
    mesh: Mesh
    devices_per_host: int
    domains: Domains
    states: tuple[State, ...]
    together: Survival
    slices: Survival | None
    bytes_of_host: int
    bytes_of_slice: int

    @property
    def held_once(self) -> tuple[State, ...]:
        """The states of which some host has the only copy of a shard."""
        return tuple(state for state in self.states if state.hosts.fatal)

    @property
    def bytes_of_device(self) -> int:
        """The bytes of the state on one device."""
        return sum(state.bytes for state in self.states)


def failures(program: SpmdProgram, devices_per_host: int) -> Failures:
    """Returns who holds the state of a training step.

        print(show(failures(program, devices_per_host=8)))

    Raises:
        ValueError: the program has no state: no input comes out again.
    """
    mesh = program.mesh
    kept = set(program.output_paths)
    inputs = zip(program.block.inputs, program.input_paths, strict=True)
    groups: dict[tuple[str, frozenset[str]], list[Value]] = {}
    for value, path in inputs:
        if path in kept:
            split = {axis for axis in value.layout.split_axes if mesh.sizes[axis] > 1}
            groups.setdefault((_kind(path), frozenset(split)), []).append(value)
    if not groups:
        raise ValueError(
            f"{program.name} has no state that lost hosts could take with them: no argument comes "
            "back as a result of the same path"
        )
    hosts = Domains.hosts(mesh, devices_per_host)
    slices = Domains.slices(mesh)
    states = tuple(
        _state(kind, axes, values, hosts, slices) for (kind, axes), values in groups.items()
    )
    every = [state.axes for state in states]
    return Failures(
        name=program.name,
        mesh=mesh,
        devices_per_host=devices_per_host,
        domains=hosts,
        states=states,
        together=survival(hosts, every),
        slices=survival(slices, every) if slices.count > 1 else None,
        bytes_of_host=sum(state.bytes_of_host for state in states),
        bytes_of_slice=sum(state.bytes * slices.shards_of_one(state.axes) for state in states),
    )


def _state(
    kind: str, axes: frozenset[str], values: list[Value], hosts: Domains, slices: Domains
) -> State:
    mesh, count = hosts.mesh, sum(value.bytes for value in values)
    splits = Counter(
        f"{dim}:{'+'.join(along)}" for value in values for dim, along in value.layout.splits
    )
    return State(
        name=kind,
        tensors=len(values),
        splits=tuple(split for split, _ in splits.most_common()),
        axes=axes,
        replicas=tuple(name for name, size in mesh.axes if size > 1 and name not in axes),
        shards=mesh.extent(axes),
        copies=mesh.size // mesh.extent(axes),
        bytes=count,
        hosts=survival(hosts, [axes]),
        slices=survival(slices, [axes]) if slices.count > 1 else None,
        bytes_of_host=count * hosts.shards_of_one(axes),
    )


def _kind(path: str) -> str:
    """Returns what a path is called: `optimizer/mean` of `state/optimizer/mean/params/mlp/w_in`."""
    words = path.split("/")
    if "params" in words:  # which may be the argument itself
        return "/".join(words[1 : words.index("params")]) or "params"
    return "/".join(words[1:]) or path
