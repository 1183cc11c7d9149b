"""The processes of a job meet before JAX connects them, so that an error can name missing ones.

JAX's runtime ends a process with a C++ stack trace if others do not come, and does not say which.
So the first process listens on the coordinator's port until all have come, and only then gives the
port to JAX.

Guarantees:
    All processes get the same values in the order of their numbers, or all get an error.
    A process that came and then ended is missing again; one that is started in its place counts.
    Each message is one line of JSON. Nothing in it is executed.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_REPORT_AFTER = 5.0  # seconds of waiting before the first report
_ACCEPT_AGAIN = 0.1  # seconds after which a connection is accepted again that could not be
_REPORT_EVERY = 10.0  # seconds between reports
_RETRY = 0.2  # seconds between two attempts to reach the first process
_HELD = 5.0  # seconds for which a program that has been killed may hold a port
_MARGIN = 10.0  # seconds that the others leave the first process to answer
_MOST = 10  # processes that are listed by number
_LONGEST = 2**16  # bytes of a message to the first process
_ADVICE = "See why it ended or was not started; --join_timeout waits longer"


@dataclass(frozen=True)
class Meeting:
    """Where and when processes meet: `Meeting("host0:1234", 4, 1).meet(value)`.

    Attributes:
        coordinator: `host:port` of the first process.
        count: how many processes there are.
        index: which of them this is.
        timeout: seconds in which all must come.
        report: takes the lines that say who is missing so far.
    """

    coordinator: str
    count: int
    index: int
    timeout: float = 60.0
    report: Callable[[str], None] = print

    def meet(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in their order.

        Args:
            value: this process's value; JSON must be able to represent it.

        Raises:
            ValueError: processes did not come, which the message names; or the numbers of the
                processes contradict each other.
        """
        if not 0 <= self.index < self.count:
            raise ValueError(f"process {self.index} of {self.count}: numbers go from 0")
        address = address_of(self.coordinator)
        if self.index == 0:
            return _Host(self, address[1]).values(value)
        return self._visit(address, value)

    def _visit(self, address: tuple[str, int], value: Any) -> list[Any]:
        """Returns the values of all from the first process."""
        began = time.monotonic()
        report_at, reason = began + _REPORT_AFTER, ""
        while (now := time.monotonic()) < began + self.timeout:
            if now >= report_at:
                self.report(f"waiting for process 0 at {self.coordinator}: {reason}")
                report_at = now + _REPORT_EVERY
            try:
                with socket.create_connection(address, min(5.0, self.timeout)) as connection:
                    reason = "it does not wait for this process, or has ended"
                    connection.settimeout(self.timeout + _MARGIN)
                    hello = {"process": self.index, "count": self.count, "value": value}
                    connection.sendall(json.dumps(hello).encode() + b"\n")
                    with connection.makefile("rb") as stream:
                        answer = json.loads(stream.readline())
                if not isinstance(answer, dict):
                    raise ValueError(answer)
            except OSError as error:
                reason = error.strerror or str(error)
                time.sleep(_RETRY)
                continue
            except ValueError:  # nothing, or what is no answer
                time.sleep(_RETRY)
                continue
            if "error" in answer:
                raise ValueError(answer["error"])
            values: list[Any] = answer["values"]
            return values
        raise ValueError(
            f"process 0, the coordinator at {self.coordinator}, did not come within "
            f"{self.timeout:g} s: {reason}. {_ADVICE}"
        )


@dataclass(eq=False)
class _Visitor:
    """A connection to the first process: from another process, or from something else.

    Attributes:
        number: the process's number, once it has sent one.
        value: the value that it sent.
    """

    connection: socket.socket
    host: str
    text: bytes = b""
    number: int | None = None
    value: Any = None


@dataclass
class _Host:
    """What the first process does: it listens until all have come."""

    meeting: Meeting
    port: int
    visitors: list[_Visitor] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)  # the hosts of those that came and ended
    contradictions: list[str] = field(default_factory=list)

    def values(self, value: Any) -> list[Any]:
        """Returns the values of all, when they have come."""
        try:
            with selectors.DefaultSelector() as selector, listening(self.port) as listener:
                selector.register(listener, selectors.EVENT_READ)
                self._listen(selector, listener)
            # The port is free from here on, before anybody looks for JAX's runtime on it.
            error = self._error()
            values = [value, *(each.value for _, each in sorted(self._came().items()))]
            self._answer({"error": error} if error else {"values": values})
        finally:
            for visitor in self.visitors:
                visitor.connection.close()
        if error:
            raise ValueError(error)
        return values

    def _listen(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        """Listens until all have come, too much time has passed, or some contradict others."""
        began = time.monotonic()
        report_at = began + _REPORT_AFTER
        while self._missing() and not self.contradictions:
            now = time.monotonic()
            if now >= began + self.meeting.timeout:
                return
            if now >= report_at:
                self.meeting.report(f"waiting for {self._listed()} to join")
                report_at = now + _REPORT_EVERY
            for key, _ in selector.select(_RETRY):
                if key.fileobj is listener:
                    connection, address = listener.accept()
                    connection.setblocking(False)
                    visitor = _Visitor(connection, str(address[0]).removeprefix("::ffff:"))
                    self.visitors.append(visitor)
                    selector.register(connection, selectors.EVENT_READ, visitor)
                elif not self._reads(key.data):
                    selector.unregister(key.fileobj)
                    self._dismiss(key.data)

    def _reads(self, visitor: _Visitor) -> bool:
        """Reads a visitor's message; returns whether it is connected and a process of the job."""
        try:
            text = visitor.connection.recv(_LONGEST)
        except OSError:
            return False
        visitor.text += text
        if not text or len(visitor.text) > _LONGEST:
            return False
        if visitor.number is not None or not visitor.text.endswith(b"\n"):
            return True
        try:
            said = json.loads(visitor.text)
            number, count, value = said["process"], said["count"], said["value"]
        except (ValueError, KeyError, TypeError):
            return False
        if not isinstance(number, int):
            return False
        self._check(visitor, number, count)
        visitor.number, visitor.value = number, value
        self.left.pop(number, None)
        return True

    def _check(self, visitor: _Visitor, number: int, count: Any) -> None:
        """Records where a visitor's message contradicts those of others."""
        if count != self.meeting.count:
            self.contradictions.append(
                f"process {number} on {visitor.host} was started with --num_processes={count}, "
                f"process 0 with {self.meeting.count}"
            )
        elif (other := self._came().get(number)) is not None:
            self.contradictions.append(
                f"two processes have the number {number}, on {other.host} and on {visitor.host}: "
                "each needs a --process_id of its own"
            )

    def _dismiss(self, visitor: _Visitor) -> None:
        visitor.connection.close()
        self.visitors.remove(visitor)
        if visitor.number is not None:
            self.left[visitor.number] = visitor.host

    def _came(self) -> dict[int, _Visitor]:
        return {each.number: each for each in self.visitors if each.number is not None}

    def _missing(self) -> list[int]:
        return sorted({*range(1, self.meeting.count)} - {*self._came()})

    def _listed(self) -> str:
        """Returns the processes that are missing, and which of them had come before."""
        notes = {n: f"was there, on {host}, and has ended" for n, host in self.left.items()}
        return listed(self._missing(), notes)

    def _error(self) -> str | None:
        """Returns the error message if the values are not complete."""
        if self.contradictions:
            return "the processes of the job cannot join: " + "; ".join(self.contradictions)
        if not self._missing():
            return None
        return (
            f"{self._listed()} did not join within {self.meeting.timeout:g} s, and the job cannot "
            f"start without. {_ADVICE}"
        )

    def _answer(self, answer: Mapping[str, Any]) -> None:
        """Sends the result of the meeting to the others."""
        text = json.dumps(answer).encode() + b"\n"
        for visitor in self.visitors:
            if visitor.number is None:
                continue
            with suppress(OSError):  # it has ended since, which the watch that follows notices
                visitor.connection.settimeout(_MARGIN)
                visitor.connection.sendall(text)


def listening(port: int, who: str = "process 0", where: str = "") -> socket.socket:
    """Returns a socket that listens on a port of this host.

    Args:
        who: who wants to, for the message.
        where: what else the message says of the port.

    Raises:
        ValueError: another program has the port, it is not allowed, or no port is free.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN
        )
    except (OSError, OverflowError) as error:  # no port is beyond 65535
        if not port:
            raise no_free_port(who, error) from error
        raise ValueError(
            f"{who} cannot listen on port {port} of this host{where}: {_reason(error)}. Choose "
            f"another port, or see what has it (ss -ltnp): an earlier job, or a second {who}"
        ) from error


def accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, Any]]:
    """Yields connections and their addresses until the listener is shut down or closed.

    What passes, such as too many open files, ends nothing: those who wait are taken later.
    """
    while True:
        try:
            connection = listener.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):
                return
            time.sleep(_ACCEPT_AGAIN)
            continue
        yield connection


def check_free(port: int, who: str = "process 0", where: str = "") -> None:
    """Checks that `listening` can take a port. One that has just been killed may hold it a while.

    Arguments and errors are those of `listening`.
    """
    end = time.monotonic() + _HELD
    while True:
        try:
            listening(port, who, where).close()
            return
        except ValueError:
            if time.monotonic() >= end:
                raise
        time.sleep(_RETRY)


def no_free_port(who: str, error: Exception) -> ValueError:
    """Returns what to raise where the kernel has no port to give."""
    return ValueError(
        f"this host has no free port for {who}: {_reason(error)}. See what has them (ss -tan), or "
        "have the kernel give more: sysctl net.ipv4.ip_local_port_range"
    )


def _reason(error: Exception) -> str:
    # Python adds the address to `strerror`, which says no more than the message does.
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error)


def address_of(coordinator: str) -> tuple[str, int]:
    """Returns the host and the port of `host:port`."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator {coordinator!r}: it is host:port, as in host0:1234")
    return host.strip("[]"), int(port)


def listed(numbers: Sequence[int], notes: Mapping[int, str] | None = None) -> str:
    """Returns processes by number, as in `processes 1, 3 (was on host3) and 5`."""
    notes = notes or {}
    texts = [f"{n} ({notes[n]})" if n in notes else str(n) for n in numbers[:_MOST]]
    if len(numbers) > _MOST:
        texts.append(f"{len(numbers) - _MOST:,} more")
    *before, last = texts
    head = "process" if len(numbers) == 1 else "processes"
    return f"{head} {', '.join(before)} and {last}" if before else f"{head} {last}"
