"""A connection between two supervisors: messages of JSON, one per line.

Guarantees:
    Each sends a beat every second. If nothing comes for `silence` seconds, or the connection
    breaks, the messages end, so that nobody waits for a host that is gone.
    Nothing in a message is executed.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_BEAT = 1.0  # seconds between two beats
_LONGEST = 2**20  # bytes of a message


class Line:
    """One end of a connection: `Line(connection, 120.0).send(start=0)`.

    Args:
        silence: seconds without a message or beat after which the other end is gone.
    """

    def __init__(self, connection: socket.socket, silence: float) -> None:
        connection.settimeout(silence)
        self._connection = connection
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def peer(self) -> str:
        """The address of the other end, or "" if the connection is broken."""
        with suppress(OSError):
            return str(self._connection.getpeername()[0]).removeprefix("::ffff:")
        return ""

    def send(self, **message: Any) -> None:
        """Sends a message. If the other end is gone, `messages` says so by its end."""
        text = json.dumps(message).encode() + b"\n"
        with self._sending, suppress(OSError):
            self._connection.sendall(text)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields what the other end sends, without beats, until it is gone."""
        try:
            with self._connection.makefile("rb") as stream:
                while (text := stream.readline(_LONGEST)).endswith(b"\n"):
                    message = json.loads(text)
                    if not isinstance(message, dict):
                        return
                    if message:
                        yield message
        except (OSError, ValueError):  # silent for too long, reset, or no messages of ours
            return
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connection, for both ends."""
        self._closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._connection.close()

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            self.send()
