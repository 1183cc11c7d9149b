"""Which supervisor of a job on several hosts leads it, and how the others find that one.

The first one writes into the workdir where it listens. Each of the others listens too. To whoever
connects, the leader sends that it leads, and the others that they stand by. When the leader is
lost, the first of the others in the order of all hosts leads: it writes that into the workdir. A
leader that was only cut off reads that, and gives way.

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
LEADS = {"leads": True}  # the first message of the leader
_CONNECT = 2.0  # seconds in which a host takes a connection
_FIRST_MESSAGE = 5.0  # seconds in which a supervisor sends whether it leads or stands by
_CLOSE = 0.5  # seconds in which the other end closes a connection to a standby
_PREFERRED = 0.5  # seconds for which candidates before a leader are waited for
_AT_ONCE = 128  # candidates that are asked at the same time

# A connection to a leader; None: a supervisor stands by; an error: no supervisor has answered.
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
        host: what messages call the host of the one before.
    """

    coordinator: str | None = None
    starts: int = 0
    lost: float = 0.0
    others: tuple[Listed, ...] = ()
    left: bool = False
    host: str = ""


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
                connection.settimeout(_CLOSE)
                connection.sendall(_STANDS_BY)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # waits until the other end has closed it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()


def asked(address: tuple[str, int]) -> socket.socket | None:
    """Returns a connection to a leader; None: a supervisor stands by there.

    Raises:
        TimeoutError: the other end takes the connection, and sends nothing.
        OSError: there is no other end, or it closes the connection.
    """
    try:
        connection = socket.create_connection(address, _CONNECT)
    except TimeoutError as error:
        raise OSError(f"it does not answer within {_CONNECT:g} s") from error
    try:
        connection.settimeout(_FIRST_MESSAGE)
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
class Responses:
    """The responses of candidates, which are `host:port` where a supervisor may lead.

    `Responses.of(["host0:1234", "host1:40001"])` asks them.

    Attributes:
        leader: the candidate where one leads; empty: there is none.
        connection: to that one.
        standing_by: the candidates where others stand by, as far as they were asked.
        silent: the candidates that take connections, and send nothing.
        reason: why the last candidate without a supervisor has none.
    """

    leader: str
    connection: socket.socket | None
    standing_by: list[str]
    silent: list[str]
    reason: str

    @classmethod
    def of(cls, candidates: Sequence[str]) -> Self:
        """Asks up to `_AT_ONCE` different candidates at a time, until a leader has answered.

        A lost rack then costs no more time than one of its hosts. If several lead, the first of the
        candidates counts if it answers within `_PREFERRED` seconds: later ones may lead other jobs.
        """
        rest, is_over = deque(candidates), threading.Event()
        answers: queue.SimpleQueue[tuple[str, _Answer]] = queue.SimpleQueue()

        def ask() -> None:
            while not is_over.is_set():
                try:
                    candidate = rest.popleft()
                except IndexError:
                    return
                answer: _Answer
                try:
                    answer = asked(address_of(candidate))
                except Exception as error:  # of any kind: `of` waits for every answer
                    answer = error
                if is_over.is_set() and isinstance(answer, socket.socket):
                    answer.close()
                answers.put((candidate, answer))

        for _ in range(min(len(rest), _AT_ONCE)):
            threading.Thread(target=ask, daemon=True).start()
        responses: dict[str, _Answer] = {}
        until: float | None = None
        while len(responses) < len(candidates):
            first = next(one for one in candidates if _may_lead(responses, one))
            if first in responses:  # it leads, and no candidate before it does
                break
            left = None if until is None else max(until - time.monotonic(), 0.0)
            try:
                candidate, answer = answers.get(timeout=left)
            except queue.Empty:
                break
            responses[candidate] = answer
            if until is None and isinstance(answer, socket.socket):
                until = time.monotonic() + _PREFERRED
        is_over.set()
        with suppress(queue.Empty):
            while True:
                candidate, responses[candidate] = answers.get_nowait()
        return cls._sorted({one: responses[one] for one in candidates if one in responses})

    @classmethod
    def _sorted(cls, responses: Mapping[str, _Answer]) -> Self:
        """Returns responses by kind. Connections but the first are closed."""
        leader, connection = "", None
        standing_by, silent, reason = [], [], "it is not there"
        for candidate, answer in responses.items():
            if isinstance(answer, socket.socket):
                if connection is None:
                    leader, connection = candidate, answer
                else:
                    answer.close()
            elif answer is None:
                standing_by.append(candidate)
            elif isinstance(answer, TimeoutError):
                silent.append(candidate)
                reason = "it takes connections, and sends nothing"
            else:
                reason = getattr(answer, "strerror", None) or str(answer)
        return cls(leader, connection, standing_by, silent, reason)


def _may_lead(responses: Mapping[str, _Answer], candidate: str) -> bool:
    """Whether a candidate has not answered yet, or leads."""
    return candidate not in responses or isinstance(responses[candidate], socket.socket)


def own_name(names: Sequence[str], others: Sequence[Listed]) -> str:
    """Returns the name by which the other hosts best reach this one.

    Args:
        names: what this host is called in the list of hosts.
    """
    here = {"127.0.0.1", "::1"}
    if all(here & {*other.names} for other in others):  # all are on one host
        return next((name for name in names if name in here), names[0])
    return next((name for name in [*names, *names_here()] if name not in here), names[0])
