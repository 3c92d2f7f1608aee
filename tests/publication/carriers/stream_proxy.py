"""A proxy between a reader and a sender of weights, which may change, drop, repeat and reorder what is sent."""

import contextlib
import socket
import threading

from areal_jax.distributed.peers import MAGIC, prove_as_client, prove_as_server
from areal_jax.publication.carriers.stream_socket import PREFIX_BYTES, connect, decode_prefix

KEY = bytes(range(32))
_PROOF_BYTES = len(MAGIC) + 32 + 32  # what the side that listens sends before the first frame


def prove_sender(own):
    return prove_as_server(own, KEY)


def prove_reader(own):
    return prove_as_client(own, KEY)


class StreamProxy:
    """Listens at `path` for readers of the sender at `address`.

    `meddle(connection, frames)` maps an iterator of whole frames to the bytes that are passed on. Connections are
    numbered from 0; where `meddle` returns, the connection is closed.
    """

    def __init__(self, path, address, meddle):
        self.address, self.connections = f'unix:{path}', 0
        self._target, self._meddle = address, meddle
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                sender = connect(self._target, 20.0)
                threading.Thread(target=self._forward, args=(reader, sender), daemon=True).start()
                threading.Thread(target=self._pass_back, args=(sender, reader, self.connections), daemon=True).start()
                self.connections += 1

    def _forward(self, reader, sender):
        with contextlib.suppress(OSError):
            while content := reader.recv(1 << 16):
                sender.sendall(content)
            sender.shutdown(socket.SHUT_RDWR)

    def _pass_back(self, sender, reader, number):
        with contextlib.suppress(OSError):
            reader.sendall(_read(sender, _PROOF_BYTES))
            for content in self._meddle(number, _frames(sender)):
                reader.sendall(content)
        for own in (reader, sender):
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
            own.close()


def _frames(sender):
    while True:
        prefix = _read(sender, PREFIX_BYTES)
        yield prefix + _read(sender, decode_prefix(prefix).n_bytes)


def _read(own, size):
    content = b''
    while len(content) < size:
        if not (taken := own.recv(size - len(content))):
            raise OSError('closed')
        content += taken
    return content
