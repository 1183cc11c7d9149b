"""Listening: the socket and the server of a command that answers over HTTP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from meshdsl.cli.mistakes.problems import Problems


def server_of(command: str, grace: int, problems: Problems) -> Callable[[Any], Any]:
    """Returns a function from an application of ASGI to its server.

    The server ends on Ctrl-C and on SIGTERM, and passes the signal on to the command line.

    Args:
        command: what needs the server, for the message if it is not installed.
        grace: the seconds in which answers may come to their ends when the server stops.
        problems: has what is not installed.
    """
    try:
        import starlette  # noqa: F401  # applications need it
        import uvicorn
    except ImportError:
        problems.add(f"`{command}` needs Starlette and Uvicorn: pip install 'meshdsl[serve]'")

    def server(application: Any) -> Any:
        return uvicorn.Server(
            uvicorn.Config(
                application,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=grace,
            )
        )

    return server


def listening(host: str, port: int, flags: str) -> socket.socket:
    """Returns a socket that listens.

    Args:
        port: 0: one that is free.
        flags: what the user wrote of the address, for the message.

    Raises:
        ValueError: the address is no address of this machine, or is taken.
    """
    kind = socket.SOCK_STREAM
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((address[0], port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        number = (isinstance(error, OSError) and error.errno) or 0
        reason = os.strerror(number) if number > 0 else str(error)
        raise ValueError(f"cannot listen on {flags}: {reason}") from None
