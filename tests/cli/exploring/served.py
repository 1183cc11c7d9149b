"""Servers of the tests: an application of ASGI on a free port, in a thread."""

import http.client
import json
import socket
import threading
from contextlib import contextmanager


@contextmanager
def served(application):
    """Yields the port of a server."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        listener.close()


def send(port, path, body=None, method=None, **headers):
    """Returns the status and the body of an answer, and the headers.

    Args:
        headers: without those of `None`. By default they are those of the page itself.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method or ("GET" if body is None else "POST"), path, skip_host=True)
    own = {"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}"}
    for name, value in {**own, **headers}.items():
        if value is not None:
            connection.putheader(name, value)
    if body is not None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    return answer.status, read, answer.headers
