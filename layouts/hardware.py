"""Hardware: the peak figures of one device of a kind, and the least time of its collectives.

All figures are peaks per device, as published. They give lower bounds: a program can be slower, for
reasons that peaks do not show.

* TPUs: "TPU v3", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" of the Cloud TPU documentation
  (docs.cloud.google.com/tpu/docs/v5p and so on): flops, memory, bandwidth of memory, chips of a
  pod. Austin et al. 2025, "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter 2,
  "TPU specs": bytes per second of one link, one way, and of the data-centre network; chapter 3:
  collectives on rings, a hop of 1 us, and which axes close to a ring (multiples of 4 on v4 and v5p,
  of 16 on v5e and v6e).
* TPU v3: the two cores of a chip are two devices, each with half of the chip's figures. Jouppi et
  al. 2020, "A domain-specific supercomputer for training deep neural networks", CACM 63(7), table
  3: 656 Gb/s of one link; only a full pod of 32 x 32 chips closes to rings. Its slices cannot be
  joined; its hosts of 8 cores have the 32 Gb/s of N1 machines (Compute Engine, "Network
  bandwidth").
* A100 SXM 80 GB, H100 SXM, H200 SXM, HGX B200: NVIDIA's data sheets: dense flops, memory, NVLink.
  Data sheets of DGX A100, H100, H200 and B200: 8 GPUs on one switch; 200 Gb/s of network for each,
  400 of the others. NCCL 2.28, `src/graph/tuning.cc`: 6.6 us to start a ring.
* cpu: one core with AVX2 at 2.5 GHz, two fused multiply-adds of 256 bits in a cycle ("Intel 64 and
  IA-32 Architectures Optimization Reference Manual"), and one channel of DDR4-3200 (JEDEC
  JESD79-4); a "collective" between virtual devices is a copy, which reads and writes memory.

* The clock of a TPU follows from its flops and its matrix units, as the Cloud TPU documentation
  counts them: 940 MHz of v3, 1,050 of v4, 1,503 of v5e, 1,751 of v5p and v6e.

* Hosts: those of TPU slices have four chips ("TPU v5p" and so on; a v5e or v6e slice of 8 chips may
  have one host), systems of NVIDIA eight GPUs.

* Products of 8 bits: the data sheets have float8 of Hopper and Blackwell, and int8 alone of A100.
  The compiler for TPU v5p and v6e (libtpu 0.0.52) gives a product of 4096^3 in float8 the cycles of
  one in bfloat16, and one in int8 half of these, or three quarters.

float32 products are those of JAX's default precision (`jax.lax.Precision.DEFAULT`): one pass of
bfloat16 on TPU, TensorFloat-32 on NVIDIA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import is_float8

_HOP = 1e-6
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute")
# As the compiler (libtpu 0.0.52) schedules them with the flags of `backends.compiler_flags`.
_ASYNCHRONOUS = {
    "v3": ("permute",),
    "v4": ("permute", "all_gather"),
    "v5e": ("permute", "all_gather"),
    "v5p": ("permute", "all_gather", "reduce_scatter", "all_reduce"),
    "v6e": ("permute", "all_gather", "reduce_scatter", "all_reduce"),
}
_OFFLOADED = 64 * 1024  # bytes; a SparseCore gets no smaller all_reduce
# Multiplications of a device in a cycle: matrix units times their rows times their columns.
_MACS = {
    "v3": 2 * 128**2,
    "v4": 8 * 128**2,
    "v5e": 4 * 128**2,
    "v5p": 8 * 128**2,
    "v6e": 4 * 256**2,
}
_GIB = 2**30


# What products are fused with. `within`: their kernels do elementwise work beside the product, read
# slices in place and write updates in place; `alone`: with nothing, as products of a library;
# `least`: with the work that reads their results, as a bound.
Products = Literal["within", "alone", "least"]


@dataclass(frozen=True)
class Tile:
    """How a device stores the last two dims of a tensor: in tiles, which it fills up."""

    sublanes: int
    lanes: int

    def filled(self, rows: int, columns: int) -> int:
        """Returns the elements that a matrix takes.

        >>> Tile(8, 128).filled(10, 100)
        2048
        """
        # A few rows have a tile of their own size.
        height = min(self.sublanes, 1 << (rows - 1).bit_length())
        return _multiple(rows, height) * _multiple(columns, self.lanes)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


@dataclass(frozen=True)
class Hardware:
    """The peaks of one device; bandwidths are bytes per second that it sends.

    Attributes:
        flops: operations per second in products of matrices, by the bytes of a number (8, 4, 2, 1).
        memory_bytes: the bytes of memory that a program can use.
        memory_bandwidth: bytes per second between the device and its memory.
        link_bandwidth: on a torus, along one mesh axis in one direction; on a switch, in total.
        network_bandwidth: of the slow network, between slices or hosts.
        joined: the number of devices that the fast network joins.
        torus: the most axes whose links work at the same time; 0: all devices are on one switch.
        ring: axes whose size is a multiple of this close to a ring on a torus.
        latency: seconds of one hop on a torus, or of one collective on a switch.
        clock: cycles per second of a TPU, in which its compiler estimates; 0 for other devices.
        asynchronous: the collectives that the compiler lets travel beside work.
        offloaded: the bytes from which on an all_reduce is one of them.
        float8: whether products of floats of 8 bits are as fast as those of int8. Elsewhere they
            are products of bfloat16.
        products: what products of matrices are fused with: see `Products`.
        tile: how tensors are stored; None: without gaps.
        host: devices that share a host, and are lost together.
    """

    name: str
    title: str
    flops: Mapping[int, float]
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    joined: int
    torus: int = 0
    ring: int = 1
    latency: float = 0.0
    clock: float = 0.0
    asynchronous: frozenset[str] = frozenset()
    offloaded: int = 0
    float8: bool = False
    products: Products = "alone"
    tile: Tile | None = None
    host: int = 1

    def peak(self, dtype: np.dtype) -> float:
        """Returns the flops per second of products of a dtype, or of the width nearest to it.

        >>> hardware("v5p").peak(np.dtype("float32"))
        459000000000000.0
        """
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        if is_float8(dtype) and not self.float8:
            width = 2
        return self.flops[min(self.flops, key=lambda known: (abs(known - width), known))]

    def slow_axes(self, mesh: Mesh) -> frozenset[str]:
        """Returns the axes that cross the slow network.

        They are those marked as slow, and those that span more devices than the fast network joins.
        Devices are numbered row-major, so an axis spans its own size times those of later axes.
        """
        slow, span = set(mesh.slow), 1
        for name, size in reversed(mesh.axes):
            span *= 1 if name in mesh.slow else size
            if size > 1 and span > self.joined:
                slow.add(name)
        return frozenset(slow)

    def _near(self, axes: Sequence[str], mesh: Mesh) -> int:
        """Returns how many devices of a collective are on one switch or slice."""
        near, span = 1, 1
        for name, size in reversed(mesh.axes):
            if name in mesh.slow:
                continue
            if name in axes:
                near *= max(1, min(size, self.joined // span))
            span *= size
        return near

    def seconds(self, kind: str, wire_bytes: float, axes: Sequence[str], mesh: Mesh) -> float:
        """Returns the least time of one collective.

        On a ring of n devices, both directions are used, and each byte crosses one link. Two kinds
        differ: the bytes of an all_to_all cross n/4 links on average, and a permute uses one
        direction. An axis that does not close to a ring has half the bandwidth. Several axes of a
        torus work at the same time. If the devices are on several switches or slices, what crosses
        between these is shared by the devices that each of them has in the collective: NCCL has a
        ring for every network card of a node, and TPUs add up within their slice first. The rest
        travels on the fast network: with NCCL meanwhile, on TPUs before and after it. (For two
        slices of 16 chips libtpu 0.0.52 writes an all_reduce as one within the slice, or as a
        reduce_scatter and an all_gather, and as a transfer between hosts that waits for them.)

        Args:
            kind: the kind of the collective.
            wire_bytes: the bytes that one device sends (see `lowering.program.wire_bytes`).
            axes: the mesh axes of the collective.
        """
        within, across = self._shares(kind, wire_bytes, axes, mesh)
        return within + across if self.torus else max(within, across)

    def least_seconds(self, kind: str, wire_bytes: float, axes: Sequence[str], mesh: Mesh) -> float:
        """Returns `seconds` if the fast and the slow network work at the same time.

        Collectives of several tensors may share them so. It is a bound for all ways to send these
        bytes.
        """
        return max(self._shares(kind, wire_bytes, axes, mesh))

    def _shares(
        self, kind: str, wire_bytes: float, axes: Sequence[str], mesh: Mesh
    ) -> tuple[float, float]:
        """Returns the least times of a collective on the fast network and on the slow one."""
        sizes = {axis: mesh.sizes[axis] for axis in axes if mesh.sizes[axis] > 1}
        if not sizes:
            return 0.0, 0.0
        slow = self.slow_axes(mesh).intersection(sizes)
        if not slow:
            return self._within(kind, wire_bytes, list(sizes.values())), 0.0
        devices, near = math.prod(sizes.values()), self._near(axes, mesh)
        crossing = wire_bytes
        if kind == "all_to_all":
            crossing *= (devices - near) / (devices - 1)
        elif kind != "permute":
            crossing *= (1 - near / devices) / (1 - 1 / devices) / near
        fast = [size for axis, size in sizes.items() if axis not in slow]
        within = self._within(kind, wire_bytes, fast or [near]) if near > 1 else 0.0
        return within, max(self.latency, crossing / self.network_bandwidth)

    def _within(self, kind: str, wire_bytes: float, sizes: Sequence[int]) -> float:
        """Returns the least time of a collective on the fast network, along axes of some sizes."""
        if not self.torus or kind == "permute":
            return max(self.latency, wire_bytes / self.link_bandwidth)
        n = max(sizes)
        closed = all(size % self.ring == 0 for size in sizes)
        bandwidth = self.link_bandwidth * (2 if closed else 1) * min(len(sizes), self.torus)
        hops = sum(size // 2 if closed else size - 1 for size in sizes)
        if kind == "all_to_all":
            wire_bytes *= (n * n // 4) / (n - 1)
        return max(hops * self.latency, wire_bytes / bandwidth)


def _tpu(
    name: str, tflops: float, memory: int, bandwidth: float, link: float, dcn: float, **rest: Any
) -> Hardware:
    bfloat16 = tflops * 1e12
    int8 = bfloat16 if name in ("v3", "v4") else 2 * bfloat16
    flops = MappingProxyType({4: bfloat16, 2: bfloat16, 1: int8})
    return Hardware(
        name,
        f"TPU {name}",
        flops,
        memory * _GIB,
        bandwidth * 1e9,
        link * 1e9,
        dcn * 1e9,
        latency=_HOP,
        clock=bfloat16 / (2 * _MACS[name]),
        asynchronous=frozenset(_ASYNCHRONOUS[name]),
        offloaded=_OFFLOADED if "all_reduce" in _ASYNCHRONOUS[name] else 0,
        products="within",
        tile=Tile(sublanes=8, lanes=128),
        host=8 if name == "v3" else 4,
        **rest,
    )


def _gpu(
    name: str,
    title: str,
    tflops: tuple[float, float, float, float],
    memory: int,
    bandwidth: float,
    link: float,
    network: float,
) -> Hardware:
    """Returns a GPU; the teraflops are those of numbers of 8, 4, 2 and 1 bytes."""
    return Hardware(
        name,
        f"NVIDIA {title}",
        MappingProxyType({8 >> i: peak * 1e12 for i, peak in enumerate(tflops)}),
        memory * _GIB,
        bandwidth * 1e12,
        link * 1e9,
        network * 1e9,
        joined=8,
        latency=6.6e-6,
        asynchronous=frozenset(COLLECTIVES),
        float8=name != "a100",
        host=8,
    )


_ALL = (
    _tpu("v3", 61.5, 16, 450, 41, 0.5, joined=2048, torus=2, ring=32),
    _tpu("v4", 275, 32, 1228, 45, 6.25, joined=4096, torus=3, ring=4),
    _tpu("v5e", 197, 16, 819, 45, 3.125, joined=256, torus=2, ring=16),
    _tpu("v5p", 459, 95, 2765, 90, 6.25, joined=8960, torus=3, ring=4),
    _tpu("v6e", 918, 32, 1640, 90, 12.5, joined=256, torus=2, ring=16),
    _gpu("a100", "A100 SXM 80 GB", (19.5, 156, 312, 624), 80, 2.039, 300, 25),
    _gpu("h100", "H100 SXM", (66.9, 494.7, 989.4, 1978.9), 80, 3.35, 450, 50),
    _gpu("h200", "H200 SXM", (66.9, 494.7, 989.4, 1978.9), 141, 4.8, 450, 50),
    _gpu("b200", "HGX B200", (37, 1125, 2250, 4500), 180, 8.0, 900, 50),
    Hardware(
        "cpu",
        "one CPU core",
        MappingProxyType({8: 40e9, 4: 80e9}),
        16 * _GIB,
        25.6e9,
        12.8e9,
        12.8e9,
        joined=2**31,
    ),
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType({kind.name: kind for kind in _ALL})
# The names of devices in drivers. Of NVIDIA's, these are the SXM boards; other boards are slower.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "TPU v3": "v3",
        "TPU v4": "v4",
        "TPU v5 lite": "v5e",
        "TPU v5e": "v5e",
        "TPU v5": "v5p",
        "TPU v5p": "v5p",
        "TPU v6 lite": "v6e",
        "TPU v6e": "v6e",
        "NVIDIA A100-SXM4-40GB": "a100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
    }
)


def sent_bytes(kind: str, devices: int, payload: float) -> float:
    """Returns the wire bytes of a collective, as `lowering.collectives` declares them.

    >>> sent_bytes("all_reduce", 4, 1024)
    1536.0

    Args:
        payload: bytes of the larger of the local operand and result.
    """
    if kind == "permute":
        return payload
    return payload * (devices - 1) / devices * (2 if kind == "all_reduce" else 1)


def hardware(name: str) -> Hardware:
    """Returns the hardware of a name, such as `v5p`.

        hardware("h100").memory_bytes

    Raises:
        ValueError: it is not known; the known names are listed.
    """
    if name not in HARDWARE:
        hint = did_you_mean(name, HARDWARE)
        raise ValueError(f"unknown hardware {name!r}; choose one of {', '.join(HARDWARE)}{hint}")
    return HARDWARE[name]


def hardware_of(kind: str) -> Hardware | None:
    """Returns the hardware of a device by the name in its driver; None if it is not known.

    >>> hardware_of("TPU v5 lite").name
    'v5e'
    """
    return HARDWARE[KINDS[kind]] if kind in KINDS else None
