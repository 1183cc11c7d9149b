"""Processes that run one program together, each with its own devices, told of by TF_CONFIG.

`{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}` is
what TensorFlow's own tools and schedulers write there. Its collectives between processes start with
a strategy of many workers, which is made for that and not used otherwise.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends import DeviceError

_SECONDS = 2.0  # in which a process that lives answers
_GLANCE = 0.2  # seconds between two looks
_ADDRESS = re.compile(r".+:\d+")
_AT_ONCE = 64  # processes that are asked at a time


@dataclass(frozen=True)
class Cluster:
    """The processes of a job.

    Attributes:
        addresses: of all of them, in order.
        index: the place of this one.
    """

    addresses: tuple[str, ...] = ("localhost",)
    index: int = 0

    @staticmethod
    def read() -> Cluster:
        """Returns what TF_CONFIG tells: this process alone, where it is not set.

        Raises:
            ValueError: it is malformed.
        """
        text = os.environ.get("TF_CONFIG", "")
        if not text.strip():
            return Cluster()
        form = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        try:
            told: dict[str, Any] = json.loads(text)
            workers = tuple(map(str, told["cluster"]["worker"]))
            task, index = str(told["task"]["type"]), int(told["task"]["index"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"TF_CONFIG cannot be read; it is written {form}") from error
        others = sorted(set(told["cluster"]) - {"worker"})
        if task != "worker" or others or not 0 <= index < len(workers):
            raise ValueError(
                f"TF_CONFIG describes task {task}:{index} of {len(workers)} workers"
                + (f" and {', '.join(others)}" if others else "")
                + f"; every process is a worker, by its place in the list: {form}"
            )
        nowhere = [address for address in workers if not _ADDRESS.fullmatch(address)]
        if nowhere:
            raise ValueError(
                f"TF_CONFIG has workers without a host and a port: {', '.join(nowhere)}; it is "
                f"written {form}"
            )
        return Cluster(workers, index)

    def name(self, device: str) -> str:
        """Returns the full name of one of this process's devices, given as `CPU:0`."""
        job = "localhost" if len(self.addresses) == 1 else "worker"
        return f"/job:{job}/replica:0/task:{self.index}/device:{device}"

    def silent(self) -> list[int]:
        """Returns the processes that do not answer."""
        others = [place for place in range(len(self.addresses)) if place != self.index]
        if not others:
            return []
        with ThreadPoolExecutor(min(len(others), _AT_ONCE)) as pool:
            found = pool.map(listens, [self.addresses[place] for place in others])
            return [place for place, there in zip(others, found, strict=True) if not there]


def listens(address: str) -> bool:
    """Whether something listens at an address, `host:port`.

    Raises:
        ValueError: it has no port.
    """
    host, _, port = address.rpartition(":")
    if not _ADDRESS.fullmatch(address):
        raise ValueError(f"{address!r} is no address of a host and its port, as host0:2222")
    try:
        with socket.create_connection((host, int(port)), _SECONDS):
            return True
    except OSError:
        return False


@functools.cache
def join(seconds: float) -> Cluster:
    """Returns the cluster, of which this process is now a member.

    TensorFlow would wait for the others without end, deaf to signals, and let no other thread run;
    so it starts when all of them are there.

    Args:
        seconds: for how long the others are waited for.

    Raises:
        ValueError: TF_CONFIG is malformed, or its port is in use.
        RuntimeError: TensorFlow has been used before, so it is too late.
        DeviceError: some of the others have not come; they are named.
    """
    cluster = Cluster.read()
    if len(cluster.addresses) > 1:
        _meet(cluster, seconds)
        tf.distribute.MultiWorkerMirroredStrategy()
    return cluster


def _meet(cluster: Cluster, seconds: float) -> None:
    """Returns when all others listen, as this process does meanwhile; then TensorFlow's servers do.

    Whoever has not seen it in time sees that.
    """
    end = time.monotonic() + seconds
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = cluster.addresses[cluster.index]
        try:
            own.bind(("", int(address.rpartition(":")[2])))
            own.listen(len(cluster.addresses) * 8)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"process {cluster.index} of TF_CONFIG cannot listen at {address}: {error}"
            ) from error
        while missing := cluster.silent():
            if time.monotonic() > end:
                told = [f"process {place} at {cluster.addresses[place]}" for place in missing]
                raise DeviceError(
                    f"process {cluster.index} has waited {seconds:g} seconds for {', '.join(told)}"
                    ", which TF_CONFIG names; start all processes of the job"
                )
            time.sleep(_GLANCE)
