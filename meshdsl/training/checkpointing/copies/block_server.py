"""Sends blocks of copies in one host's memory to the processes of other hosts.

A connection begins with a secret that only processes of the job know, since they draw it together.
Then each line of JSON asks for a part of a block, and is answered by its bytes.

Guarantees:
    Nothing is sent to whoever does not know the secret, and nothing but blocks of copies.
    Nobody waits for longer than `_PATIENCE` for the next bytes of a host that does not answer.
"""

from __future__ import annotations

import hmac
import json
import math
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from meshdsl.training.checkpointing.newest import BLOCKS
from meshdsl.training.processes.meeting import accepted, listening

_PATIENCE = 30.0  # seconds for which either end waits for the other
_LONGEST = 2**16  # bytes of a line
_FOLDER = re.compile(r"process\.\d+")
_FAILED = 2**64 - 1  # in place of a size
_PIECE = 2**20  # bytes that are sent at once


class Unreachable(Exception):
    """Another host does not send what it has; the message says why."""


class BlockServer:
    """Answers for a folder of copies until its block ends: `BlockServer(folder, secret).port`.

    Raises:
        ValueError: it cannot listen.
    """

    def __init__(self, folder: Path, secret: str) -> None:
        self._folder, self._secret = folder, secret.encode()
        self._listener = listening(0, "what sends copies")
        self.port: int = self._listener.getsockname()[1]
        self._connections = set[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in [*self._connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that answers it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _accept(self) -> None:
        for connection, _ in accepted(self._listener):
            self._connections.add(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """Answers one connection until it ends."""
        connection.settimeout(_PATIENCE)
        with suppress(OSError), connection, connection.makefile("rb") as stream:
            if hmac.compare_digest(stream.readline(_LONGEST).strip(), self._secret):
                connection.settimeout(None)  # between its questions it may read elsewhere
                while (line := stream.readline(_LONGEST)) and self._sent(connection, line):
                    pass
        self._connections.discard(connection)

    def _sent(self, connection: socket.socket, line: bytes) -> bool:
        """Answers a question; returns whether it could."""
        try:
            data = self._part(json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            text = str(error).encode()[:_LONGEST]
            connection.sendall(_FAILED.to_bytes(8, "little") + _size(text) + text)
            return False
        view = data.data
        connection.settimeout(_PATIENCE)  # of each piece
        connection.sendall(_size(view))
        for first in range(0, len(view), _PIECE):
            connection.sendall(view[first : first + _PIECE])
        connection.settimeout(None)
        return True

    def _part(self, asked: Mapping[str, Any]) -> np.ndarray:
        """Returns the bytes of a part of a block."""
        if not _FOLDER.fullmatch(asked["folder"]):
            raise ValueError(f"{asked['folder']!r} is no folder of copies")
        file = self._folder / asked["folder"] / str(int(asked["step"])) / BLOCKS
        with safe_open(file, framework="numpy") as opened:
            block: np.ndarray = opened.get_tensor(asked["name"])
        if asked["within"] is not None:
            block = block[tuple(slice(start, stop) for start, stop in asked["within"])]
        return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


class BlockClient:
    """Gets blocks of other hosts, over one connection to each, until its block ends.

    Args:
        addresses: by process that answers, the names of its host and its port.

    Attributes:
        received: how many bytes have come.
    """

    def __init__(self, addresses: Mapping[int, tuple[Sequence[str], int]], secret: str) -> None:
        self.received = 0
        self._addresses, self._secret = addresses, secret
        self._open: dict[int, socket.socket] = {}

    def part(
        self,
        process: int,
        asked: Mapping[str, Any],
        sizes: Sequence[int],
        dtype: np.dtype[Any],
    ) -> np.ndarray:
        """Returns a part of a block.

        Args:
            process: the one that answers for the host that has it.
            asked: `folder`, `step`, `name` of the block, and `within`: from where to where in each
                dim; None: the block.

        Raises:
            Unreachable: it is not sent.
        """
        data = np.empty(math.prod(sizes) * dtype.itemsize, np.uint8)
        try:
            connection = self._connection(process)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            size = int.from_bytes(_received(connection, 8), "little")
            if size == _FAILED:
                text = _received(connection, int.from_bytes(_received(connection, 8), "little"))
                raise OSError(f"it cannot read {asked['name']}: {text.decode()}")
            if size != data.size:
                raise OSError(f"it sent {size} bytes for {data.size}")
            _receive(connection, memoryview(data.data))
        except OSError as error:
            if process in self._open:
                self._open.pop(process).close()
            names, port = self._addresses[process]
            raise Unreachable(
                f"process {process} on {names[-1]} does not send them, on its port {port}: "
                f"{error.strerror or error}"
            ) from error
        self.received += data.size
        return data.view(dtype).reshape(sizes)

    def _connection(self, process: int) -> socket.socket:
        if process not in self._open:
            names, port = self._addresses[process]
            failure = OSError("it has no address")
            for name in names:
                try:
                    connection = socket.create_connection((name, port), _PATIENCE)
                except OSError as error:
                    failure = error
                    continue
                connection.sendall(self._secret.encode() + b"\n")
                self._open[process] = connection
                return connection
            raise failure
        return self._open[process]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for connection in self._open.values():
            connection.close()


def _size(data: bytes | memoryview) -> bytes:
    return len(data).to_bytes(8, "little")


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive(connection, memoryview(data))
    return bytes(data)


def _receive(connection: socket.socket, into: memoryview) -> None:
    """Fills a buffer from a connection."""
    while into:
        count = connection.recv_into(into)
        if not count:
            raise OSError("the connection was closed")
        into = into[count:]
