"""Processes that run one program together, each with its own devices, told of by TF_CONFIG.

`{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}` is
what TensorFlow's own tools and schedulers write there. Its collectives between processes start with
a strategy of many workers, which is made for that and not used otherwise.
"""

from __future__ import annotations

import functools
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_SECONDS = 2.0  # in which a process that lives answers


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
        return Cluster(workers, index)

    def name(self, device: str) -> str:
        """Returns the full name of one of this process's devices, given as `CPU:0`."""
        job = "localhost" if len(self.addresses) == 1 else "worker"
        return f"/job:{job}/replica:0/task:{self.index}/device:{device}"

    def silent(self) -> list[int]:
        """Returns the processes that do not answer."""
        others = [place for place in range(len(self.addresses)) if place != self.index]
        return [place for place in others if not answers(self.addresses[place])]


def answers(address: str) -> bool:
    """Whether something listens at an address, `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _SECONDS):
            return True
    except OSError:
        return False


@functools.cache
def join() -> Cluster:
    """Returns the cluster, of which this process is now a member; waits for no other.

    Raises:
        ValueError: TF_CONFIG is malformed.
        RuntimeError: TensorFlow has been used before, so it is too late.
    """
    cluster = Cluster.read()
    if len(cluster.addresses) > 1:
        tf.distribute.MultiWorkerMirroredStrategy()
    return cluster
