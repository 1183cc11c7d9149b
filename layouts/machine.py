"""Machines: where a calibration was measured, and what of it differs from the machine at hand."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_WORDS = {"device_kind": "kind of device"}  # for messages; other fields are called as they are
_OF_ALL = ("platform", "device_kind", "devices", "jaxlib")
_OF_CPUS = ("processor", "cores")  # what also decides the speed of virtual CPU devices


@dataclass(frozen=True)
class Machine:
    """The machine of a calibration.

    Attributes:
        platform: as JAX names it: cpu, gpu or tpu.
        device_kind: the name of the devices in their driver.
        devices: how many were at work.
        cores: those of the CPU that the process may use.
        processor: the name of the CPU.
        jaxlib: the version of jaxlib.
        host: the name of the machine in the network, for people; machines with other names may be
            alike.
    """

    platform: str
    device_kind: str
    devices: int
    cores: int
    processor: str
    jaxlib: str
    host: str

    @staticmethod
    def here(platform: str = "", device_kind: str = "", devices: int = 0) -> Machine:
        """Returns this machine; without arguments, what is known before JAX looks for devices."""
        try:
            jaxlib = version("jaxlib")
        except PackageNotFoundError:
            jaxlib = "none"
        return Machine(platform, device_kind, devices, cores(), _processor(), jaxlib, _host_name())

    def differences(self, here: Machine) -> list[str]:
        """Returns what differs on a machine: `cores: 2 there, 4 here`.

        What is not known of that machine, and is empty or 0, is left out.
        """
        names = (*_OF_ALL, *(_OF_CPUS if self.platform == "cpu" else ()))
        pairs = [(name, getattr(self, name), getattr(here, name)) for name in names]
        return [
            f"{_WORDS.get(name, name)}: {there} there, {ours} here"
            for name, there, ours in pairs
            if ours and there != ours
        ]

    def __str__(self) -> str:
        return f"{self.devices} {self.device_kind} device{'s' if self.devices > 1 else ''}"


def cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Returns the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _host_name() -> str:
    return platform.node()
