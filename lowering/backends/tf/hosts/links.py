"""Links between host devices, CPUs or GPUs, in one process or several: TensorFlow's collectives.

Guarantees:
    Every device runs its collectives in the program's order: each collective uses the same
    resource, the device's `token`. Without it devices would wait for each other.
    A token says in which collective its device is, and how many have ended (see `tokens`). The
    watchdog reads it to see whether a collective takes too long, and errors name the collective.

TensorFlow reduces six dtypes and moves five or six (2.21). Others are sent as integers, and small
ones as 32-bit numbers if it has no smaller dtype. TensorFlow adds large tensors in half precision
in that dtype; tensors up to 64 KiB are added in float32 here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.hosts import tokens
from meshdsl.lowering.backends.tf.hosts.keys import group_key
from meshdsl.lowering.backends.tf.machine import Arrays
from meshdsl.lowering.backends.tf.operations.wire_dtypes import (
    as_keys,
    as_words,
    from_keys,
    from_words,
    reduced,
)

_REDUCED = ("bfloat16", "float16", "float32", "float64", "int32", "int64")
_GATHERED = ("float16", "float32", "float64", "int32", "int64")
_SMALL = 64 * 1024  # bytes
_OPERATIONS = {"sum": "Add", "max": "Max", "min": "Min"}


@dataclass(frozen=True)
class HostLinks:
    """The collectives of one program.

    Attributes:
        device: the number of the device, a tensor.
        token: the resource of that device (see `tokens`).
        names: the full names of all devices of the mesh.
        instances: the keys of the collectives, the same in every process.
    """

    compiled: ClassVar[bool] = False
    mesh: Mesh
    device: tf.Tensor
    token: tf.Tensor
    names: Sequence[str]
    instances: Iterator[int]

    def packed(self, op: str) -> float:
        """Returns 64 KiB: copies of larger tensors cost more than collectives of their own."""
        return _SMALL

    def begin(self, number: int) -> list[tf.Operation]:
        return [tokens.begin(self.token, number)]

    def end(self, number: int) -> list[tf.Operation]:
        return [tokens.end(self.token, number)]

    def in_order(self) -> list[tf.Operation]:
        return [tokens.touch(self.token)]

    def reduce(self, x: tf.Tensor, axes: Sequence[str], kind: str) -> tf.Tensor:
        size = x.shape.num_elements() * x.dtype.size
        if kind == "sum" and _is_half(x.dtype) and size <= _SMALL:
            return tf.cast(self.reduce(tf.cast(x, tf.float32), axes, kind), x.dtype)
        keys = as_keys(x, kind, _REDUCED)
        reduced_keys = tf.raw_ops.CollectiveReduceV2(
            input=keys, merge_op=_OPERATIONS[kind], final_op="Id", **self._group(axes)
        )
        return from_keys(tf.ensure_shape(reduced_keys, keys.shape), kind, x.dtype)

    def scatter(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """Exchanges and sums: CPUs have no reduce_scatter, and this sends as many bytes."""
        return reduced(self.exchange(rows, axes), "sum")

    def gather(self, x: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        words = as_words(x, _GATHERED)
        gathered = tf.raw_ops.CollectiveGatherV2(input=words[None], **self._group(axes))
        gathered = tf.ensure_shape(gathered, [self.mesh.extent(axes), *words.shape])
        return _reordered(from_words(gathered, x.dtype), self._ranks(axes))

    def exchange(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        ranks = self._ranks(axes)
        positions = [ranks.index(rank) for rank in range(len(ranks))]
        return _reordered(self._exchanged(_reordered(rows, positions), self._group(axes)), ranks)

    def _exchanged(self, rows: tf.Tensor, group: dict[str, Any]) -> tf.Tensor:
        words = as_words(rows, _REDUCED)
        received = tf.raw_ops.CollectiveAllToAllV2(input=words, **group)
        return from_words(tf.ensure_shape(received, words.shape), rows.dtype)

    def permute(self, x: tf.Tensor, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
        """Exchanges between pairs of devices, in rounds: TensorFlow has no permute for hosts."""
        source = {target: source for source, target in pairs}
        devices = range(self.mesh.size)
        result = None
        sends_to_itself = [source.get(device) == device for device in devices]
        if any(sends_to_itself):
            result = self._where(sends_to_itself, x, result)
        for partners in rounds([pair for pair in pairs if pair[0] != pair[1]], self.mesh.size):
            numbered = list(enumerate(partners))
            sizes = [1 + int(device != partner) for device, partner in numbered]
            keys = [self._group_key({d, p}) for d, p in numbered]
            rows = tf.stack([x, x])  # the partner's row and its own, in the order of their numbers
            size: Any = sizes[0]
            if len(set(sizes)) > 1:
                size = self._own_entry(sizes)
                rows = rows[:size]
            received = self._exchanged(rows, self._keyed(size, self._own_entry(keys)))
            partner_row = received[
                self._own_entry([int(device < partner) for device, partner in numbered])
            ]
            wanted = [d != p and source.get(d) == p for d, p in numbered]
            result = self._where(wanted, tf.ensure_shape(partner_row, x.shape), result)
        return tf.zeros_like(x) if result is None else result

    def _where(self, wanted: Sequence[bool], x: tf.Tensor, rest: tf.Tensor | None) -> tf.Tensor:
        """Returns x on the devices where `wanted` is true, and `rest`, or zeros, on all others."""
        if all(wanted):
            return x
        rest = tf.zeros_like(x) if rest is None else rest
        return tf.where(self._own_entry(list(map(int, wanted))) == 1, x, rest)

    def barrier(self, values: Arrays) -> Arrays:
        return tf.identity_n(list(values))

    def _ranks(self, axes: Sequence[str]) -> list[int]:
        """Returns TensorFlow's rank of each member of a group: it sorts them by device number."""
        group = self.mesh.groups(*axes)[0]
        return [sorted(group).index(member) for member in group]

    def _group(self, axes: Sequence[str]) -> dict[str, Any]:
        """Returns the parameters of a collective along some axes."""
        keys = [0] * self.mesh.size
        for group in self.mesh.groups(*axes):
            key = self._group_key(group)
            for member in group:
                keys[member] = key
        return self._keyed(self.mesh.extent(axes), self._own_entry(keys))

    def _keyed(self, size: Any, key: tf.Tensor) -> dict[str, Any]:
        """Returns the parameters of a collective in a group of a size and a key."""
        return {
            "group_size": size,
            "group_key": key,
            "instance_key": next(self.instances),
            "ordering_token": [self.token],
            "communication_hint": "auto",
            "timeout_seconds": 0,  # see `watchdog`
        }

    def _group_key(self, devices: Iterable[int]) -> int:
        return group_key([self.names[device] for device in devices])

    def _own_entry(self, table: Sequence[int]) -> tf.Tensor:
        """Returns this device's entry of a table with one for each device: an s32 scalar."""
        if len(set(table)) == 1:
            return tf.constant(table[0], tf.int32)
        return tf.gather(tf.constant(table, tf.int32), self.device)


def rounds(pairs: Sequence[tuple[int, int]], devices: int) -> Iterator[list[int]]:
    """Yields the rounds of a permute: for every device its partner, or itself without one.

    Each pair (source, target) are partners in some round.
    """
    rest = list(pairs)
    while rest:
        partners, later = list(range(devices)), []
        for source, target in rest:
            if partners[source] == target:
                continue
            if partners[source] == source and partners[target] == target:
                partners[source], partners[target] = target, source
            else:
                later.append((source, target))
        rest = later
        yield partners


def _reordered(rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """Returns rows in another order; themselves if the order is the same."""
    return rows if list(order) == list(range(len(order))) else tf.gather(rows, order)


def _is_half(dtype: tf.DType) -> bool:
    return dtype.is_floating and dtype.size < 4
