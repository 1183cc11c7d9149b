"""TensorFlow's TPU programs without a TPU: run on this CPU, and compiled by the TPU compiler.

The program of one replica converts to StableHLO, with its collectives and their groups. XLA:CPU,
which is part of jaxlib, runs that as replicas, one on each of the virtual devices, and libtpu
compiles it for the chips of a slice. This module may stand for a backend, with its `Executable`.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import topologies
from jax.extend.backend import get_compile_options
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.lowering.backends.tf.arguments import Storage
from meshdsl.lowering.backends.tf.hosts.devices import host_devices
from meshdsl.lowering.backends.tf.tpus.program import replica
from meshdsl.lowering.program import SpmdProgram
from meshdsl.running.jit import Jitted
from meshdsl.tensors.cuts import pad

# Lists of tensors, which loops stack their results in, become arrays; then all becomes StableHLO.
_PASSES = ("tf-tensor-list-ops-decomposition", "tf-lower-to-mlprogram-and-hlo")

# The converter folds some constants into another dialect, which its own passes refuse.
_FOLDED = r"arith\.constant (dense<.*>) : (tensor<\S+>)$"


def program_text(program: SpmdProgram) -> str:
    """Returns the program of a replica as StableHLO text."""
    host_devices(md.Mesh())  # tracing starts TensorFlow, with all the CPUs it will have
    return stablehlo(replica(program))


def stablehlo(concrete: Any) -> str:
    """Returns a concrete function as StableHLO text, with `@main` for its name."""
    assert not concrete.captured_inputs
    text = tf.mlir.experimental.convert_function(concrete, pass_pipeline="tf-standard-pipeline")
    entry = re.search(r'func\.func (@"[^"]+"|@[\w.\-]+)\(', text)
    assert entry is not None, text[:1000]
    text = text.replace(f"{entry.group(1)}(", "@main(")  # the passes begin at this name
    text = re.sub(_FOLDED, r'"tf.Const"() <{value = \1 : \2}> : () -> \2', text, flags=re.MULTILINE)
    for name in _PASSES:
        text = tf.mlir.experimental.run_pass_pipeline(text, name)
    left = sorted(set(re.findall(r'"?\b(tf\.[A-Z]\w+)', text)))
    assert not left, f"these operations have no StableHLO: {', '.join(left)}"
    return re.sub(r'dense<"0x(\w+)"> : tensor<([\dx]+)xi1>', _bytes_of_bits, text)


def _bytes_of_bits(constant: re.Match[str]) -> str:
    """Returns a constant of booleans as jaxlib writes it, each a byte; TensorFlow packs them."""
    digits, sizes = constant.groups()
    packed = np.frombuffer(bytes.fromhex(digits), np.uint8)
    count = math.prod(int(size) for size in sizes.split("x"))
    bits = np.unpackbits(packed, count=count, bitorder="little")
    return f'dense<"0x{bits.tobytes().hex().upper()}"> : tensor<{sizes}xi1>'


def jit(function: Callable, *arguments: Any, **options: Any) -> Jitted:
    """Returns what `md.jit` does, run as the replicas of a TPU job."""
    jitted = md.jit(function, *arguments, backend="tf", **options)
    jitted._backend = sys.modules[__name__]
    return jitted


class Executable:
    """A program as replicas on this process's virtual CPU devices.

    Attributes:
        inputs, outputs: how each is stored.
        cuts: those of the outputs.
        text: the program of a replica, as StableHLO.

    Raises:
        ValueError: the mesh needs more devices than there are.
    """

    def __init__(
        self, program: SpmdProgram, donated: Sequence[bool] = (), devices: Any = None
    ) -> None:
        mesh, count = program.mesh, program.mesh.size
        if count > len(jax.devices()):
            raise ValueError(f"mesh {mesh} needs {count} devices, of {len(jax.devices())}")
        self.program = program
        self.inputs = [Storage.of(value, mesh) for value in program.block.inputs]
        self.outputs = [Storage.of(value, mesh) for value in program.block.outputs]
        self.cuts = [stored.cuts for stored in self.outputs]
        self.text = program_text(program)
        self._devices = jax.devices()[:count]
        self._sharding = NamedSharding(Mesh(self._devices, "replica"), PartitionSpec())
        options = get_compile_options(count, 1, np.arange(count))
        client = self._devices[0].client
        self._loaded = client.compile_and_load(_held(self.text), self._devices, options)

    def call_flat(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Runs the program; returns its results as they are stored, put together."""
        numbers = np.arange(len(self._devices), dtype=np.int32)
        arguments = [self._placed(numbers)]
        for leaf, stored in zip(leaves, self.inputs, strict=True):
            arguments.append(self._placed(stored.shards(leaf, numbers.tolist())))
        results = self._loaded.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [
            put_together(stored, [np.asarray(shard) for shard in shards])
            for stored, shards in zip(self.outputs, results, strict=True)
        ]

    def _placed(self, shards: Sequence[Any]) -> jax.Array:
        """Returns an array of which every device has a value of its own, as replicas do."""
        placed = [jax.device_put(*pair) for pair in zip(shards, self._devices, strict=True)]
        shape = placed[0].shape
        return jax.make_array_from_single_device_arrays(shape, self._sharding, placed)

    def as_text(self) -> str:
        """Returns the optimised HLO of a replica."""
        return self._loaded.hlo_modules()[0].to_string()


def _held(text: str) -> str:
    """Returns StableHLO that XLA:CPU can compile: it fails where a block that is sent is constant.

    It sends blocks one by one, and those differ in their order in memory, so all are hidden.
    """

    def hide(match: re.Match[str]) -> str:
        indent, start, sent, middle, kind = match.groups()
        hidden = f"%sent_{match.start()}"
        barrier = f"{indent}{hidden} = stablehlo.optimization_barrier {sent} : {kind}"
        return f"{barrier}\n{indent}{start}({hidden}){middle}({kind}) ->"

    line = r'^( *)(%\w+ = "stablehlo\.all_to_all")\((%\w+)\)( <.*> : )\((.*)\) ->'
    return re.sub(line, hide, text, flags=re.MULTILINE)


def put_together(stored: Storage, shards: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the stored array of shards by device; replicas must agree, to the last bit."""
    logical = np.ones([dim.size for dim in stored.dims], bool)
    real = pad(np, logical, stored.cuts) if stored.cuts else logical
    whole = np.zeros(stored.sizes, stored.dtype)
    seen = np.zeros(stored.sizes, bool)
    for part, shard in zip(stored.parts, shards, strict=True):
        assert shard.dtype == stored.dtype and shard.shape == whole[part].shape
        if seen[part].all():
            both = np.array([whole[part][real[part]], shard[real[part]]])
            floating = not np.issubdtype(both.dtype, np.integer) and both.dtype != bool
            assert np.array_equal(both[0], both[1], equal_nan=floating)
        whole[part], seen[part] = shard, True
    assert seen.all()
    return whole


def compile_for_tpu(text: str, topology: str, replicas: int) -> str:
    """Returns the optimised HLO that libtpu makes of StableHLO, for chips that are not there.

    `compile_for_tpu(text, "v5p:4x4x4", 64)`. Both cores of a v4 chip work as one.
    """
    devices = _chips(topology)[:replicas]
    assert len(devices) == replicas, f"{topology} has {len(devices)} chips"
    # The devices as the compiler takes them: no public name makes those.
    listed = Mesh(np.array(devices), "replica")._internal_device_list
    with tempfile.TemporaryDirectory() as folder:
        # jaxlib cannot read all programs that libtpu makes; libtpu writes what it made.
        dump = {"xla_dump_to": folder}
        options = get_compile_options(replicas, 1, np.array(devices), env_options_overrides=dump)
        devices[0].client.compile(_module(text), listed, options)
        (file,) = Path(folder).glob("*.after_optimizations.txt")
        return file.read_text()


def _chips(topology: str) -> list[Any]:
    cores = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _NO_TPU.items():
            patch.setenv(name, os.environ.get(name, value))
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **cores)
    return found.devices


# libtpu must not ask the network for a TPU; several processes may compile at a time.
_NO_TPU = {
    "TPU_ACCELERATOR_TYPE": "v5e-256",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _module(text: str) -> ir.Module:
    """Returns parsed StableHLO; the context of a JAX function knows all the dialects in it."""
    known = jax.jit(lambda: 0).lower().compiler_ir("stablehlo").context
    return ir.Module.parse(text, known)
