"""The proxy of a soak: it carries both ways, slowly where it is told to, and cuts."""

import contextlib
import socket
import threading
import time

import pytest

from tests.soak.proxy import Proxy


@pytest.fixture
def echo():
    """The port of a server that sends everything back."""
    listener = socket.create_server(('127.0.0.1', 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=send_back, args=(connection,), daemon=True).start()

    def send_back(connection):
        with connection:
            while content := connection.recv(4096):
                connection.sendall(content)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def connect(proxy):
    host, _, port = proxy.url.removeprefix('http://').partition(':')
    return socket.create_connection((host, int(port)), 10)


def read_rest(connection):
    """Everything until the end of the connection, which may be a reset."""
    found = b''
    with contextlib.suppress(ConnectionResetError):
        while content := connection.recv(4096):
            found += content
    return found


def test_it_carries_and_can_be_slow_and_cut(echo):
    with Proxy(echo) as proxy, connect(proxy) as connection:
        connection.sendall(b'hello')
        assert connection.recv(100) == b'hello'
        proxy.bytes_s = 50.0
        began = time.monotonic()
        connection.sendall(b'x' * 10)
        assert connection.recv(100) == b'x' * 10
        assert time.monotonic() - began > 0.3
        proxy.cut()
        assert not read_rest(connection)  # it has ended; nothing that was on its way arrives


def test_a_server_that_is_dead_cuts_the_connection():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    with Proxy(port) as proxy, connect(proxy) as connection:
        assert not read_rest(connection)
