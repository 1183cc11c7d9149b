"""What the supervisors of a job on several hosts must have alike, and why one is refused.

Guarantees:
    A host that cannot take part is refused when it comes, not when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from meshdsl.training.launching.crew import Command, free_port
from meshdsl.training.launching.elastic import Elastic
from meshdsl.training.launching.warm import Warm
from meshdsl.training.processes.meeting import address_of

_DEVICES = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


class Devices(NamedTuple):
    """How many devices each process of a host has.

    Attributes:
        given: whether the user has said so; else it is what /dev shows, which may be others'.
    """

    number: int
    given: bool


@dataclass(frozen=True)
class Terms:
    """What the supervisors of a job must agree on.

    Attributes:
        coordinator: `host:port` of the first supervisor. The processes meet at the port after it.
        total: how many processes the job has.
        code: the version of this package's code.
        silence: seconds without a word after which a host is gone.
        elastic: how fewer processes go on; None: they wait.
        moved: whether the first supervisor is not the one of the command line's coordinator: its
            processes then meet at any free port of its host.
    """

    coordinator: str
    total: int
    code: str
    silence: float
    elastic: Elastic | None = None
    moved: bool = False

    @property
    def meeting(self) -> str:
        """Where the processes of the next start meet."""
        _, port = address_of(self.coordinator)
        return f"{self.coordinator.rpartition(':')[0]}:{free_port() if self.moved else port + 1}"


@dataclass(frozen=True)
class Host:
    """What a supervisor knows of its host and of the job, whether it leads or not.

    Attributes:
        numbers: the numbers of the processes on this host.
        command: returns the command line of a process, given the flags that are its own.
        environment: the variables of the processes.
        patience: seconds for which it waits for other hosts, at first and after a loss.
        report: takes each line that it writes.
        shrink_after: seconds after which fewer processes, or spare hosts, go on.
        copies: this host's folder of copies in memory.
        spare: whether this host waits until another one is lost.
        warm: the template that its processes come of, if there is one.
        devices: how many each process has; None: it is not known.
        rehearses: whether programs are compiled ahead for fewer processes.
    """

    terms: Terms
    numbers: range
    command: Command
    environment: Mapping[str, str]
    workdir: Path
    patience: tuple[float, float]
    report: Callable[[str], None]
    shrink_after: float = 0.0
    copies: Path | None = None
    spare: bool = False
    warm: Warm | None = None
    devices: Devices | None = None
    rehearses: bool = False


def devices_here(virtual: int | None, environment: Mapping[str, str]) -> Devices | None:
    """Returns how many devices a process of this host has, as far as one sees without JAX.

    None: that is not known. A supervisor never opens devices, which its processes need.

    Args:
        virtual: how many virtual devices each process makes, if it does.
    """
    if virtual is not None:
        return Devices(virtual, True)
    if environment.get("JAX_PLATFORMS") == "cpu":
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [one.strip() for one in visible.split(",") if one.strip()]
        hidden = not named or any(one.startswith("-") for one in named)
        return None if hidden else Devices(len(named), True)
    return next((Devices(len(found), False) for one in _DEVICES if (found := glob(one))), None)


def other_code(hello: Mapping[str, Any], terms: Terms) -> str:
    """Returns how a supervisor differs that may not know the messages of this one."""
    if not isinstance(hello.get("code"), str) or hello["code"] == terms.code:
        return ""
    return (
        f"the code of meshdsl on {hello.get('host')} is {hello['code']}, and {terms.code} on the "
        "first host: install the same version on both"
    )


def misfit(hello: Mapping[str, Any], terms: Terms) -> str:
    """Returns why a supervisor cannot take part, whenever it comes."""
    elastic = None if terms.elastic is None else terms.elastic.axis
    if hello["elastic"] != elastic:
        theirs, ours = (axis or "not given" for axis in (hello["elastic"], elastic))
        return f"--elastic_axis is {theirs} on {hello['host']} and {ours} on the first host"
    if hello["total"] != terms.total:
        return f"--num_processes is {hello['total']} on {hello['host']} and {terms.total} here"
    first, last = hello["first"], hello["first"] + hello["processes"] - 1
    if not hello["spare"] and (last >= terms.total or first < 0):
        return f"process {last} goes beyond the {terms.total} of --num_processes"
    return ""


def other_devices(host: str, own: Devices | None, known: Collection[Devices | None]) -> str:
    """Returns how the devices of a host differ from those of all other hosts.

    Args:
        known: those of other hosts.
    """
    usual = sorted({one.number for one in known if one is not None})
    if own is None or not usual or own.number in usual:
        return ""
    return (
        f"each process on {host} has {own.number} device{'s' * (own.number != 1)}, those of other "
        f"hosts {' or '.join(map(str, usual))}, and all need the same. See --host_devices and "
        "CUDA_VISIBLE_DEVICES, or which devices are missing (`meshdsl doctor`)"
    )
