"""Whether all processes of a job see the same workdir, and hosts none but their own memory."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import jax

from meshdsl.training.processes.joining import gathered, together

_PATIENCE = 10.0  # seconds in which a network disk shows a new file to other hosts
_LOOK = 0.05  # seconds between two looks


def check_shared(workdir: str | os.PathLike[str]) -> None:
    """Checks that all processes see the same workdir; all of them must call this.

    Each writes its part of a checkpoint: on different disks none would be complete.

    Raises:
        ValueError: in every process, with those that see another one.
    """
    if jax.process_count() == 1:
        return
    folder = Path(workdir).absolute()
    host, token = json.loads(gathered(json.dumps([socket.gethostname(), uuid.uuid4().hex]))[0])
    file = folder / f"shared.{token}"
    try:
        with together():
            if jax.process_index() == 0:
                _touch(file)
        with together():
            _await(file, f"workdir {folder} is not the one of process 0, on {host}")
    finally:
        if jax.process_index() == 0:
            file.unlink(missing_ok=True)


def check_apart(folder: Path, hosts: Sequence[str]) -> None:
    """Checks that each host has a folder of copies of its own; all processes must call this.

    Args:
        hosts: of each process, what tells its host's folder from those of other hosts.

    Raises:
        ValueError: in every process, if one host sees the files of another.
    """
    if len({*hosts}) == 1:
        return
    own = hosts[jax.process_index()]
    leads = hosts.index(own) == jax.process_index()
    said = gathered(json.dumps([socket.gethostname(), uuid.uuid4().hex]))
    files, names = {}, {}
    for host, text in zip(reversed(hosts), reversed(said), strict=True):  # the first one stays
        names[host], token = json.loads(text)
        files[host] = folder / f"host.{token}"
    try:
        with together():
            if leads:
                _touch(files[own], "folder")
        with together():
            others = [host for host in dict.fromkeys(hosts) if host != own and leads]
            seen = [names[host] for host in others if files[host].exists()]
            if seen:
                raise ValueError(
                    f"the folder of copies {folder} is on a disk that hosts share: {names[own]} "
                    f"sees the files of {', '.join(seen)}. Each host deletes copies that processes "
                    "of another start have left there, and would delete those of other hosts. "
                    "Give a folder in the host's own memory: --host_copies=/dev/shm/mine"
                )
    finally:
        if leads:
            files[own].unlink(missing_ok=True)


def _touch(file: Path, what: str = "workdir") -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise ValueError(
            f"cannot write to {file.parent}: {error.strerror}. Choose another {what}"
        ) from error


def _await(file: Path, problem: str) -> None:
    """Waits until a file of another process is there.

    Raises:
        ValueError: it does not come.
    """
    end = time.monotonic() + _PATIENCE
    while not file.exists():
        if time.monotonic() > end:
            raise ValueError(
                f"{problem}: it is on a disk that they do not share, so that no checkpoint would "
                "be complete. Give a --workdir on a disk that all hosts see"
            )
        time.sleep(_LOOK)
