"""Which supervisor of a job on several hosts leads it, and how the others find that one.

The first one writes into the workdir where it listens. Each of the others listens too, and says
that it stands by; the one that leads says that. When it is lost, the first of the others in the
order of all hosts leads: it writes that into the workdir. One that was only cut off finds that and
gives way.

Guarantees:
    Where two lead at once, the one that wrote last does, and the other gives way within a second
    after it can read that.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from meshdsl.training.processes.joining import names_here
from meshdsl.training.processes.meeting import accepted, address_of, listening

TOKEN = "launch.id"  # the file by which supervisors see that they share the workdir, and who leads
_STANDS_BY = b'{"stands_by": true}\n'
LEADS = {"leads": True}  # the first message of the one that leads
_CONNECT = 2.0  # seconds in which a host takes a connection
_SPEAK = 5.0  # seconds in which it says whether it leads or stands by
_HEARD = 0.5  # seconds in which one that has asked closes the connection
_PREFERRED = 0.5  # seconds for which places before one that leads are waited for
_AT_ONCE = 128  # places that are asked at the same time

# A connection to one that leads; None: one stands by; an error: no supervisor has answered.
_Answer: TypeAlias = socket.socket | Exception | None


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
                connection.settimeout(_HEARD)
                connection.sendall(_STANDS_BY)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # until the other one has closed it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()


def asked(address: tuple[str, int]) -> socket.socket | None:
    """Returns a connection to what leads; None: a supervisor stands by there.

    Raises:
        TimeoutError: something takes the connection, and says nothing.
        OSError: nobody takes it, or it is closed again.
    """
    try:
        connection = socket.create_connection(address, _CONNECT)
    except TimeoutError as error:
        raise OSError(f"it does not answer within {_CONNECT:g} s") from error
    try:
        connection.settimeout(_SPEAK)
        said = connection.recv(len(_STANDS_BY), socket.MSG_PEEK)
        if not said:
            raise ConnectionError("it takes connections and closes them")
        if not _STANDS_BY.startswith(said):
            return connection
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise


@dataclass(frozen=True)
class Found:
    """What was heard where supervisors may be: `Found.at(places)`.

    Attributes:
        leads: where one leads; empty: nowhere.
        connection: to that one.
        stand_by: where others stand by, as far as they were asked.
        silent: where something takes connections, and says nothing.
        reason: what was in the way at the last place that was no supervisor's.
    """

    leads: str
    connection: socket.socket | None
    stand_by: list[str]
    silent: list[str]
    reason: str

    @classmethod
    def at(cls, places: Sequence[str]) -> Self:
        """Asks at `_AT_ONCE` different places at a time, until one that leads has answered.

        So a rack that is lost takes as long as one host of it does. Of several that lead, the first
        in the list counts if it answers at about the same time: others may be of other jobs.
        """
        rest, over = deque(places), threading.Event()
        answers: queue.SimpleQueue[tuple[str, _Answer]] = queue.SimpleQueue()

        def ask() -> None:
            while not over.is_set():
                try:
                    place = rest.popleft()
                except IndexError:
                    return
                answer: _Answer
                try:
                    answer = asked(address_of(place))
                except Exception as error:  # whatever it is: the answer is waited for
                    answer = error
                if over.is_set() and isinstance(answer, socket.socket):
                    answer.close()
                answers.put((place, answer))

        for _ in range(min(len(rest), _AT_ONCE)):
            threading.Thread(target=ask, daemon=True).start()
        heard: dict[str, _Answer] = {}
        until: float | None = None
        while len(heard) < len(places):
            open_places = (place for place in places if _may_lead(heard, place))
            if next(open_places) in heard:  # it leads, and none before it does
                break
            left = None if until is None else max(until - time.monotonic(), 0.0)
            try:
                place, answer = answers.get(timeout=left)
            except queue.Empty:
                break
            heard[place] = answer
            if until is None and isinstance(answer, socket.socket):
                until = time.monotonic() + _PREFERRED
        over.set()
        with suppress(queue.Empty):
            while True:
                place, heard[place] = answers.get_nowait()
        return cls._of({place: heard[place] for place in places if place in heard})

    @classmethod
    def _of(cls, heard: Mapping[str, _Answer]) -> Self:
        leads, connection = "", None
        stand_by, silent, reason = [], [], "it is not there"
        for place, answer in heard.items():
            if isinstance(answer, socket.socket):
                if connection is None:
                    leads, connection = place, answer
                else:
                    answer.close()
            elif answer is None:
                stand_by.append(place)
            elif isinstance(answer, TimeoutError):
                silent.append(place)
                reason = "it takes connections, and says nothing"
            else:
                reason = getattr(answer, "strerror", None) or str(answer)
        return cls(leads, connection, stand_by, silent, reason)


def _may_lead(heard: Mapping[str, _Answer], place: str) -> bool:
    """Whether a place has not answered yet, or leads."""
    return place not in heard or isinstance(heard[place], socket.socket)


def own_name(names: Sequence[str], others: Sequence[Listed]) -> str:
    """Returns the name by which the other hosts best reach this one.

    Args:
        names: what this host is called in the list of hosts.
    """
    here = {"127.0.0.1", "::1"}
    if all(here & {*other.names} for other in others):  # all are on one host
        return next((name for name in names if name in here), names[0])
    return next((name for name in [*names, *names_here()] if name not in here), names[0])
