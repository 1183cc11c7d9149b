"""A connection between two supervisors: messages of JSON, one per line.

Guarantees:
    Each sends a beat every second. If nothing comes for `silence` seconds, or the connection
    breaks, the messages end, so that nobody waits for a host that is gone.
    `send` never waits, and may be called in a handler of signals.
    Nothing in a message is executed.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_BEAT = 1.0  # seconds between two beats
_LONGEST = 2**20  # bytes of a message
_FLUSHING = 2.0  # seconds in which the last messages are sent


class Line:
    """One end of a connection: `Line(connection, 120.0).send(start=0)`.

    Args:
        silence: seconds without a message or beat after which the other end is gone.

    Attributes:
        heard: when something came last, by `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, silence: float) -> None:
        connection.settimeout(silence)
        self.heard = time.monotonic()
        self._connection = connection
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, **message: Any) -> None:
        """Sends a message. If the other end is gone, `messages` shows it by its end."""
        self._waiting.put(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields what the other end sends, without beats, until it is gone."""
        try:
            with self._connection.makefile("rb") as stream:
                while (text := stream.readline(_LONGEST)).endswith(b"\n"):
                    self.heard = time.monotonic()
                    message = json.loads(text)
                    if not isinstance(message, dict):
                        return
                    if message:
                        yield message
        except (OSError, ValueError):  # silent for too long, reset, or no messages of ours
            return
        finally:
            self.close()

    def wait(self, seconds: float) -> None:
        """Takes the other end for gone after so many seconds without a message or beat."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """Ends the connection, for both ends, once the messages before are sent."""
        self._waiting.put(None)
        self._writer.join(_FLUSHING)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._connection.close()

    def _write(self) -> None:
        while True:
            try:
                text = self._waiting.get(timeout=_BEAT)
            except queue.Empty:
                text = b"{}\n"
            if text is None:
                return
            with suppress(OSError):
                self._connection.sendall(text)
