"""The processes that run one program together, each with its own devices, as TF_CONFIG lists them.

`{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}` is
the form that TensorFlow's tools and schedulers write. TensorFlow starts collectives between
processes with a strategy of several workers. It is created for that only, and not used otherwise.
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

_SECONDS = 2.0  # for a connection to a process; a live one answers sooner
_PAUSE = 0.2  # seconds between two attempts
_ADDRESS = re.compile(r".+:\d+")
_THREADS = 64  # connections at a time


@dataclass(frozen=True)
class Cluster:
    """The processes of a job.

    Attributes:
        addresses: of all processes, in order.
        index: of this process.
    """

    addresses: tuple[str, ...] = ("localhost",)
    index: int = 0

    @staticmethod
    def read() -> Cluster:
        """Returns the cluster of TF_CONFIG; without TF_CONFIG, one of this process alone.

        Raises:
            ValueError: TF_CONFIG is malformed.
        """
        text = os.environ.get("TF_CONFIG", "")
        if not text.strip():
            return Cluster()
        form = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        try:
            config: dict[str, Any] = json.loads(text)
            workers = tuple(map(str, config["cluster"]["worker"]))
            task, index = str(config["task"]["type"]), int(config["task"]["index"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"TF_CONFIG cannot be read; it is written {form}") from error
        others = sorted(set(config["cluster"]) - {"worker"})
        if task != "worker" or others or not 0 <= index < len(workers):
            raise ValueError(
                f"TF_CONFIG describes task {task}:{index} of {len(workers)} workers"
                + (f" and {', '.join(others)}" if others else "")
                + f"; every process is a worker, by its place in the list: {form}"
            )
        malformed = [address for address in workers if not _ADDRESS.fullmatch(address)]
        if malformed:
            raise ValueError(
                f"TF_CONFIG has workers without a host and a port: {', '.join(malformed)}; it is "
                f"written {form}"
            )
        return Cluster(workers, index)

    def name(self, device: str) -> str:
        """Returns the full name of one of this process's devices, given as `CPU:0`."""
        job = "localhost" if len(self.addresses) == 1 else "worker"
        return f"/job:{job}/replica:0/task:{self.index}/device:{device}"

    def unreachable(self) -> list[int]:
        """Returns the indices of the processes that do not answer."""
        others = [index for index in range(len(self.addresses)) if index != self.index]
        if not others:
            return []
        with ThreadPoolExecutor(min(len(others), _THREADS)) as pool:
            answers = pool.map(listens, [self.addresses[index] for index in others])
            return [index for index, answered in zip(others, answers, strict=True) if not answered]


def listens(address: str) -> bool:
    """Whether a process listens at an address, `host:port`.

    Raises:
        ValueError: the address has no port.
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
    """Joins the cluster of TF_CONFIG, and returns it.

    Args:
        seconds: how long to wait for the other processes.

    Raises:
        ValueError: TF_CONFIG is malformed, or its port is in use.
        RuntimeError: TensorFlow has been used before, so it is too late.
        DeviceError: some of the others have not started; the message names them.
    """
    cluster = Cluster.read()
    if len(cluster.addresses) > 1:
        # TensorFlow would wait for the others for ever, without handling signals or running other
        # threads. So it starts only when all of them listen.
        _meet(cluster, seconds)
        tf.distribute.MultiWorkerMirroredStrategy()
    return cluster


def _meet(cluster: Cluster, seconds: float) -> None:
    """Waits until all other processes listen; this process listens meanwhile."""
    # After it returns, TensorFlow's server listens at the same port. A process that has not seen
    # this one yet sees the server.
    deadline = time.monotonic() + seconds
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = cluster.addresses[cluster.index]
        try:
            listener.bind(("", int(address.rpartition(":")[2])))
            listener.listen(len(cluster.addresses) * 8)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"process {cluster.index} of TF_CONFIG cannot listen at {address}: {error}"
            ) from error
        while missing := cluster.unreachable():
            if time.monotonic() > deadline:
                names = [f"process {index} at {cluster.addresses[index]}" for index in missing]
                raise DeviceError(
                    f"process {cluster.index} has waited {seconds:g} seconds for {', '.join(names)}"
                    ", which TF_CONFIG names; start all processes of the job"
                )
            time.sleep(_PAUSE)
