"""Links between the cores of a TPU: TensorFlow's TPU collectives.

There are three: an all-reduced sum, an all_to_all (`exchange`) and a permutation. Gathers, scatters
and other reductions are exchanges, which send as many bytes as the best algorithms for them. A
gather sends its shard to every other device, (n-1)/n of its result; a scatter sends each other
device its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import tensorflow as tf
from jax import lax
from jax.experimental import jax2tf

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.machine import Arrays
from meshdsl.lowering.backends.tf.operations.wire_dtypes import reduced

_SUMMED = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.uint32)
_BARRIER = jax2tf.convert(
    lambda *arrays: lax.optimization_barrier(arrays),
    with_gradient=False,
    native_serialization_platforms=("cpu", "tpu"),
)


@dataclass(frozen=True)
class TpuLinks:
    """The collectives of one program, between replicas in the order of the mesh's devices."""

    compiled: ClassVar[bool] = True
    mesh: Mesh

    def packed(self, op: str) -> float:
        """Returns 0 for sums, which XLA joins itself, and no limit for all others."""
        return 0 if op == "all_reduce" else math.inf

    def begin(self, number: int) -> list[tf.Operation]:
        """Records nothing: TPUs report by themselves what they were doing."""
        return []

    def end(self, number: int) -> list[tf.Operation]:
        return []

    def in_order(self) -> list[tf.Operation]:
        return []

    def reduce(self, x: tf.Tensor, axes: Sequence[str], kind: str) -> tf.Tensor:
        if kind == "sum" and x.dtype in _SUMMED:
            return tf.raw_ops.CrossReplicaSum(input=x, group_assignment=self._groups(axes))
        count, size = self.mesh.extent(axes), x.shape.num_elements()
        padded = tf.pad(tf.reshape(x, [-1]), [(0, -size % count)])
        rows = tf.reshape(padded, [count, padded.shape[0] // count])
        own_row = reduced(self.exchange(rows, axes), kind)
        return tf.reshape(tf.reshape(self.gather(own_row, axes), [-1])[:size], x.shape)

    def scatter(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        return reduced(self.exchange(rows, axes), "sum")

    def gather(self, x: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        copies = tf.broadcast_to(x[None], [self.mesh.extent(axes), *x.shape])
        return self.exchange(copies, axes)

    def exchange(self, rows: tf.Tensor, axes: Sequence[str]) -> tf.Tensor:
        return tf.raw_ops.AllToAll(
            input=rows,
            group_assignment=self._groups(axes),
            concat_dimension=0,
            split_dimension=0,
            split_count=rows.shape[0],
        )

    def permute(self, x: tf.Tensor, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
        if x.dtype == tf.bool:
            return tf.cast(self.permute(tf.cast(x, tf.uint8), pairs), tf.bool)
        return tf.raw_ops.CollectivePermute(input=x, source_target_pairs=list(map(list, pairs)))

    def barrier(self, values: Arrays) -> Arrays:
        """Runs XLA's barrier as JAX exports it: TensorFlow has no operation for it."""
        with jax.enable_x64(True):  # else JAX would narrow 64-bit numbers
            return _BARRIER(*values)

    def _groups(self, axes: Sequence[str]) -> list[list[int]]:
        return [list(group) for group in self.mesh.groups(*axes)]
