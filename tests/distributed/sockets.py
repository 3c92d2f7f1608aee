"""The socket under a connection, for tests that do to it what only another program would."""

import os
import socket

from areal_jax.distributed.peers import Connection, Part


def seal(connection: Connection, part: Part) -> bytes:
    """The bytes of a part as the next one on this connection."""
    return connection.seal(part) + b''.join(part.content)


def send_raw(connection: Connection, content: bytes) -> None:
    """Sends bytes that are no part of a message, or that were sealed before."""
    with _socket_of(connection) as own:
        own.sendall(content)


def cut(connection: Connection) -> None:
    """Ends the connection in both directions, as the death of a process does."""
    with _socket_of(connection) as own:
        own.shutdown(socket.SHUT_RDWR)


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
