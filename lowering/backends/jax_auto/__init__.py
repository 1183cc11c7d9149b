"""The jax_auto backend: one program of global arrays, which XLA partitions by constraints."""

from meshdsl.lowering.backends.jax import (
    Storage,
    device_mesh,
    partition_spec,
    runtime,
)
from meshdsl.lowering.backends.jax_auto.emitters import EMITTERS
from meshdsl.lowering.backends.jax_auto.executable import Executable, function

__all__ = [
    "EMITTERS",
    "Executable",
    "Storage",
    "device_mesh",
    "function",
    "partition_spec",
    "runtime",
]
