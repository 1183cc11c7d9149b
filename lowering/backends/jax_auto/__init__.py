"""The jax_auto backend: one program of whole arrays, which XLA splits as it is asked to."""

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
