"""Bytes pass through a relay unchanged; that the first process has ended does not."""

import os
import socket
import threading

import pytest

from meshdsl.training.processes import relay as relays
from meshdsl.training.processes.relay import Relay, reached_directly
from tests.training.processes.test_watching import free_port, port, until

NAME = "no_grpc_proxy"


@pytest.fixture
def relayed(monkeypatch):
    """Returns what connects two sockets by a relay: JAX's, and that of the first process."""
    monkeypatch.setattr(relays, "_RETRY", 0.01)
    opened = []

    def connected(lost=lambda: None):
        first = socket.create_server(("localhost", 0))
        relay = Relay(("localhost", port(first)), threading.Event(), lost)
        relay.start()
        host, _, number = relay.address.rpartition(":")
        own = socket.create_connection((host, int(number)), 60)
        other = first.accept()[0]
        other.settimeout(60)
        opened.extend([first, own, other])
        return relay, own, other

    yield connected
    for each in opened:
        each.close()


def received(connection, count):
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def is_open(connection):
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


def test_bytes_pass_in_both_directions(relayed):
    _, own, other = relayed()
    data = os.urandom(2**22)
    for source, target in ((own, other), (other, own)):
        thread = threading.Thread(target=source.sendall, args=(data,))
        thread.start()
        assert received(target, len(data)) == data
        thread.join()


def test_when_jax_leaves_the_first_process_sees_it(relayed):
    lost = []
    _, own, other = relayed(lambda: lost.append(True))
    own.close()
    assert received(other, 1) == b"" and not lost


@pytest.mark.parametrize("sending", [False, True])
def test_jax_does_not_see_that_the_first_process_has_ended_until_its_own_leaves(relayed, sending):
    relay, own, other = relayed()
    other.close()
    if sending:
        for _ in range(3):
            own.sendall(b"a heartbeat")
    assert is_open(own)
    relay.over.set()
    until(lambda: not is_open(own))


def test_a_lost_connection_that_nobody_else_sees_is_reported(relayed, monkeypatch):
    monkeypatch.setattr(relays, "_GRACE", 0.1)
    lost = []
    _, _, other = relayed(lambda: lost.append(True))
    other.close()
    until(lambda: lost)


def test_one_that_leaves_has_lost_nothing(relayed, monkeypatch):
    monkeypatch.setattr(relays, "_GRACE", 0.3)
    lost = []
    relay, own, other = relayed(lambda: lost.append(True))
    relay.over.set()
    other.close()
    until(lambda: not is_open(own))
    assert not lost


def test_the_first_process_may_begin_to_listen_later(monkeypatch):
    monkeypatch.setattr(relays, "_RETRY", 0.01)
    number = free_port()
    relay = Relay(("localhost", number), threading.Event(), lambda: None)
    relay.start()
    with socket.create_connection(relay._listener.getsockname(), 60) as own:
        own.sendall(b"early")
        with socket.create_server(("localhost", number)) as first:
            other, _ = first.accept()
            with other:
                assert received(other, 5) == b"early"
    relay.close()


def test_one_that_never_listens_is_refused_and_a_closed_relay_accepts_nothing(monkeypatch):
    monkeypatch.setattr(relays, "_RETRY", 0.001)
    relay = Relay(("localhost", free_port()), threading.Event(), lambda: None)
    relay.start()
    address = relay._listener.getsockname()
    with socket.create_connection(address, 60) as own:
        assert own.recv(1) == b""
    relay.close()
    with pytest.raises(OSError):
        socket.create_connection(address, 1).close()


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ({"no_proxy": "host0"}, None),
        ({"http_proxy": "proxy"}, "127.0.0.1"),
        ({"grpc_proxy": "proxy", "no_proxy": "host0"}, "host0,127.0.0.1"),
        ({"https_proxy": "proxy", "no_proxy": "host0", NAME: "host1"}, "host1,127.0.0.1"),
    ],
)
def test_no_proxy_is_asked_for_this_host_while_jax_connects(before, within, monkeypatch):
    for name in ("no_proxy", NAME, "http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with reached_directly():
        assert os.environ.get(NAME) == within
    assert os.environ.get(NAME) == before.get(NAME)
