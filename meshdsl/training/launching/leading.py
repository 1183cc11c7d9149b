"""Which supervisor of a job on several hosts leads it, and how the others find that one.

The first one writes into the workdir where it listens. Each of the others listens too, and says
that it stands by. When the one that leads is lost, the first of them in the order of all hosts
leads: it writes that into the workdir. One that was only cut off finds that and gives way.

Guarantees:
    Where two lead at once, the one that wrote last does, and the other gives way within a second
    after it can read that.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from meshdsl.training.processes.joining import names_here
from meshdsl.training.processes.meeting import accepted, listening

TOKEN = "launch.id"  # the file by which supervisors see that they share the workdir, and who leads
_STANDS_BY = b'{"stands_by": true}\n'
_CONNECT = 2.0  # seconds in which a host takes a connection
_SPEAK = 0.5  # seconds in which one that stands by says so


class Superseded(Exception):
    """Another supervisor leads the job now."""


@dataclass(frozen=True)
class Succession:
    """What a supervisor needs to lead a job.

    Attributes:
        coordinator: where it listens; None: at the coordinator of the command line.
        starts: how many starts the job has had.
        lost: when the one before was lost, in seconds since 1970.
        others: the hosts that stood by then, and so will come.
        left: whether the one before has left the job, whose state is saved.
    """

    coordinator: str | None = None
    starts: int = 0
    lost: float = 0.0
    others: tuple[Listed, ...] = ()
    left: bool = False


@dataclass(frozen=True)
class Listed:
    """A supervisor in the list of hosts that all of them have, in the order in which they lead.

    Attributes:
        own_id: what tells it from others.
        names: names or addresses of its host.
        port: the port at which it stands by.
        places: how many processes its host has places for.
        host: what messages call its host.
    """

    own_id: str
    names: tuple[str, ...]
    port: int
    places: int
    host: str

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self:
        names = tuple(map(str, entry["names"]))
        numbers = int(entry["port"]), int(entry["places"])
        return cls(str(entry["own_id"]), names, *numbers, str(entry["host"]))

    def addresses(self) -> list[tuple[str, int]]:
        return [(name, self.port) for name in self.names]


def names_of(peer: str, own: Sequence[str]) -> list[str]:
    """Returns the names of a host: its address as another one sees it, and those it knows of."""
    peer = peer.removeprefix("::ffff:")
    names = [name for name in own if name != peer]
    return [*names, peer] if peer.startswith("127.") or peer == "::1" else [peer, *names]


def written(name: str, port: int) -> str:
    """Returns `host:port`."""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def lead(workdir: Path, coordinator: str) -> str:
    """Says in the workdir who leads; returns what others then read there."""
    return _write(workdir, {"token": os.urandom(8).hex(), "leads": coordinator})


def end(workdir: Path, code: int) -> None:
    """Says in the workdir that the job is over, and with which exit code, for hosts cut off."""
    _write(workdir, {"token": os.urandom(8).hex(), "leads": None, "over": code})


def leader(workdir: Path) -> tuple[str, str | None]:
    """Returns what the workdir says of who leads, and that one's `host:port`, if it names it."""
    text, said = _read(workdir)
    leads = said.get("leads")
    return text, None if leads is None else str(leads)


def ended(workdir: Path) -> int | None:
    """Returns the exit code of the job, if the workdir says that it is over."""
    code = _read(workdir)[1].get("over")
    return code if isinstance(code, int) else None


def _write(workdir: Path, said: Mapping[str, Any]) -> str:
    text = json.dumps(said)
    aside = workdir / f"{TOKEN}.{os.urandom(4).hex()}"
    aside.write_text(text)
    os.replace(aside, workdir / TOKEN)
    return text


def _read(workdir: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = (workdir / TOKEN).read_text()
        said = json.loads(text)
    except (OSError, ValueError):
        return "", {}
    return (text, said) if isinstance(said, dict) else ("", {})


class Standby:
    """Listens, and says to whoever connects that this supervisor stands by.

    Attributes:
        port: where it listens.
    """

    def __init__(self) -> None:
        self._listener = listening(0, "the supervisor, where it stands by")
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        for connection, _ in accepted(self._listener):
            with suppress(OSError), connection:
                connection.settimeout(_SPEAK)
                connection.sendall(_STANDS_BY)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # so that what the other sends does not reset it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()


def asked(address: tuple[str, int]) -> socket.socket | bool:
    """Returns a connection to what may lead, or whether a supervisor stands by there.

    Raises:
        OSError: nobody takes the connection.
    """
    connection = socket.create_connection(address, _CONNECT)
    try:
        connection.settimeout(_SPEAK)
        try:
            said = connection.recv(len(_STANDS_BY), socket.MSG_PEEK)
        except TimeoutError:  # one that leads is silent until it is spoken to
            return connection
        if said and not _STANDS_BY.startswith(said):
            return connection
        connection.close()
        return bool(said)
    except BaseException:
        connection.close()
        raise


def own_name(names: Sequence[str], others: Sequence[Listed]) -> str:
    """Returns the name by which the other hosts best reach this one.

    Args:
        names: what this host is called in the list of hosts.
    """
    here = {"127.0.0.1", "::1"}
    if all(here & {*other.names} for other in others):  # all are on one host
        return next((name for name in names if name in here), names[0])
    return next((name for name in [*names, *names_here()] if name not in here), names[0])
