"""Links between host devices, CPUs or GPUs, in one process or many: TensorFlow's collectives.

Guarantees:
    Every device runs its collectives in one order, the program's: each takes the same resource, the
    device's `token`. Without it they would wait for each other.
    A token tells in which collective its device is, and how many it has ended (see `tokens`): by
    these the watchdog sees whether any is waited for too long, and errors tell which it was.

TensorFlow reduces six dtypes and moves five or six (2.21); others travel as integers, and numbers
below 32 bits as such of 32 where it has nothing smaller. A sum in half precision is added up in it,
as TensorFlow does, where it is large; up to 64 KiB it is added up in float32.
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
    of_keys,
    of_words,
    reduced,
)

_REDUCED = ("bfloat16", "float16", "float32", "float64", "int32", "int64")
_GATHERED = ("float16", "float32", "float64", "int32", "int64")
_SMALL = 64 * 1024  # bytes
_OPERATIONS = {"sum": "Add", "max": "Max", "min": "Min"}


@dataclass(frozen=True)
class HostLinks:
    """Collectives of one program.

    Attributes:
        device: the number of the device, a tensor.
        token: the resource of that device that `tokens` tells of.
        names: the full names of all devices of the mesh.
        instances: the numbers of the collectives, the same in every process.
    """

    compiled: ClassVar[bool] = False
    mesh: Mesh
    device: tf.Tensor
    token: tf.Tensor
    names: Sequence[str]
    instances: Iterator[int]

    def packed(self, op: str) -> float:
        """Copies of larger ones cost more than collectives of their own."""
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
        moved = tf.raw_ops.CollectiveReduceV2(
            input=keys, merge_op=_OPERATIONS[kind], final_op="Id", **self._group(axes)
        )
        return of_keys(tf.ensure_shape(moved, keys.shape), kind, x.dtype)

    def scatter(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        """There is no such collective between CPUs: an exchange and a sum send as much."""
        return reduced(self.exchange(rows, axes), "sum")

    def gather(self, x: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        words = as_words(x, _GATHERED)
        moved = tf.raw_ops.CollectiveGatherV2(input=words[None], **self._group(axes))
        moved = tf.ensure_shape(moved, [self.mesh.extent(axes), *words.shape])
        return _reordered(of_words(moved, x.dtype), self._ranks(axes))

    def exchange(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        ranks = self._ranks(axes)
        places = [ranks.index(rank) for rank in range(len(ranks))]
        return _reordered(self._exchanged(_reordered(rows, places), self._group(axes)), ranks)

    def _exchanged(self, rows: tf.Tensor, group: dict[str, Any]) -> tf.Tensor:
        words = as_words(rows, _REDUCED)
        moved = tf.raw_ops.CollectiveAllToAllV2(input=words, **group)
        return of_words(tf.ensure_shape(moved, words.shape), rows.dtype)

    def permute(self, x: tf.Tensor, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
        """There is no such collective: two devices exchange, in rounds of pairs of them."""
        source = {target: source for source, target in pairs}
        devices = range(self.mesh.size)
        found = None
        own = [source.get(device) == device for device in devices]
        if any(own):
            found = self._chosen(own, x, found)
        for partners in rounds([pair for pair in pairs if pair[0] != pair[1]], self.mesh.size):
            numbered = list(enumerate(partners))
            sizes = [1 + int(device != partner) for device, partner in numbered]
            keys = [self._group_key({d, p}) for d, p in numbered]
            rows = tf.stack([x, x])  # the partner's row and its own, in the order of the two
            size: Any = sizes[0]
            if len(set(sizes)) > 1:
                size = self._own(sizes)
                rows = rows[:size]
            received = self._exchanged(rows, self._keyed(size, self._own(keys)))
            other = received[self._own([int(device < partner) for device, partner in numbered])]
            wanted = [d != p and source.get(d) == p for d, p in numbered]
            found = self._chosen(wanted, tf.ensure_shape(other, x.shape), found)
        return tf.zeros_like(x) if found is None else found

    def _chosen(self, wanted: Sequence[bool], x: tf.Tensor, rest: tf.Tensor | None) -> tf.Tensor:
        """Returns x on the devices that are to have it, and elsewhere the rest, or zeros."""
        if all(wanted):
            return x
        rest = tf.zeros_like(x) if rest is None else rest
        return tf.where(self._own(list(map(int, wanted))) == 1, x, rest)

    def barrier(self, values: Arrays) -> Arrays:
        return tf.identity_n(list(values))

    def _ranks(self, axes: Sequence[str]) -> list[int]:
        """Returns what number TensorFlow gives each member of a group: those of devices ascend."""
        group = self.mesh.groups(*axes)[0]
        return [sorted(group).index(member) for member in group]

    def _group(self, axes: Sequence[str]) -> dict[str, Any]:
        """Returns the parameters of a collective along some axes."""
        keys = [0] * self.mesh.size
        for group in self.mesh.groups(*axes):
            key = self._group_key(group)
            for member in group:
                keys[member] = key
        return self._keyed(self.mesh.extent(axes), self._own(keys))

    def _keyed(self, size: Any, key: tf.Tensor) -> dict[str, Any]:
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

    def _own(self, table: Sequence[int]) -> tf.Tensor:
        if len(set(table)) == 1:
            return tf.constant(table[0], tf.int32)
        return tf.gather(tf.constant(table, tf.int32), self.device)


def rounds(pairs: Sequence[tuple[int, int]], devices: int) -> Iterator[list[int]]:
    """Yields, for every device, its partner in a round: itself, if it has none.

    In each round a device has one partner, and each (source, target) is partnered in some round.
    """
    left = list(pairs)
    while left:
        partners, later = list(range(devices)), []
        for source, target in left:
            if partners[source] == target:
                continue
            if partners[source] == source and partners[target] == target:
                partners[source], partners[target] = target, source
            else:
                later.append((source, target))
        left = later
        yield partners


def _reordered(rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    return rows if list(order) == list(range(len(order))) else tf.gather(rows, order)


def _is_half(dtype: tf.DType) -> bool:
    return dtype.is_floating and dtype.size < 4
