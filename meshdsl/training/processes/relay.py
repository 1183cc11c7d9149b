"""Connects JAX's runtime to the first process, and keeps a lost connection from it.

JAX's runtime ends a process with a C++ stack trace at the moment in which its connection to the
first process closes. No option changes that, and its callback cannot be one of Python's. So JAX
connects to a port of its own host, and threads pass on the bytes of both sides. When the first
process ends, JAX's connection stays open, and the watch has the time to name who has ended.

Guarantees:
    Bytes pass unchanged and in order.
    When JAX closes its connection, the one to the first process closes.
    When the first process closes its connection, JAX's stays open until `over` is set. If nothing
    has ended this process after a while, `lost` is called.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_HERE = "127.0.0.1"
_BYTES = 2**16  # that are passed on at a time
_RETRY = 0.1  # seconds between two attempts to reach the first process
_ATTEMPTS = 50  # after which JAX tries again by itself
_CONNECT = 10.0  # seconds for one attempt
_IDLE = 60  # seconds without traffic, after which the system checks that the other host is there
_PROXIES = {"grpc_proxy", "https_proxy", "http_proxy"}  # variables that gRPC looks at
_GRACE = 40.0  # seconds in which the watch names who has ended


def _listening() -> socket.socket:
    return socket.create_server((_HERE, 0))


@dataclass(frozen=True)
class Relay:
    """Passes on what JAX's runtime and the first process send each other.

    Attributes:
        target: the host and port of the first process.
        over: set when this process leaves the job.
        lost: called when the first process has closed its connection, and this one still runs.
    """

    target: tuple[str, int]
    over: threading.Event
    lost: Callable[[], None]
    _listener: socket.socket = field(default_factory=_listening)

    @property
    def address(self) -> str:
        """The `host:port` to which JAX connects."""
        return f"{_HERE}:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections; those that are open stay."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                own = self._listener.accept()[0]
                threading.Thread(target=self._connect, args=(own,), daemon=True).start()

    def _connect(self, own: socket.socket) -> None:
        """Connects to the first process, which may begin to listen a moment later."""
        for _ in range(_ATTEMPTS):
            try:
                other = socket.create_connection(self.target, _CONNECT)
                break
            except OSError:
                time.sleep(_RETRY)
        else:
            own.close()
            return
        other.settimeout(None)
        for each in (own, other):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        left = threading.Event()  # JAX has closed its connection
        threading.Thread(target=self._forth, args=(own, other, left), daemon=True).start()
        _pass_on(other, own)
        if not left.is_set() and not self.over.wait(_GRACE) and not left.is_set():
            self.lost()
        for each in (own, other):
            _hang_up(each)

    def _forth(self, own: socket.socket, other: socket.socket, left: threading.Event) -> None:
        """Passes on what JAX sends, until it closes its connection."""
        _pass_on(own, other)
        while not left.is_set():
            try:  # if the first process has ended, JAX's bytes lead nowhere
                if not own.recv(_BYTES):
                    left.set()
            except OSError:
                left.set()
        _hang_up(other)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Passes on bytes until one of the sides is closed."""
    with suppress(OSError):
        while data := source.recv(_BYTES):
            target.sendall(data)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def reached_directly() -> Iterator[None]:
    """Lets gRPC, with which JAX connects, reach this host without a proxy, within its block."""
    if not _PROXIES & {*os.environ}:  # JAX warns of any variable of a proxy
        yield
        return
    name = "no_grpc_proxy"  # gRPC looks at it before `no_proxy`
    before = os.environ.get(name)
    others = before or os.environ.get("no_proxy", "")
    os.environ[name] = f"{others},{_HERE}" if others else _HERE
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
