"""The JAX backend: a program becomes one `jax.shard_map` with explicit collectives."""

from meshdsl.lowering.backends.jax import runtime
from meshdsl.lowering.backends.jax.arguments import Storage, partition_spec
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.executable import (
    Executable,
    device_mesh,
    function,
)

__all__ = [
    "EMITTERS",
    "Executable",
    "Storage",
    "device_mesh",
    "function",
    "partition_spec",
    "runtime",
]
