"""Senders over a Unix socket that kill themselves, each in a forked child: argv = directory, moments...

Each child prints its moment and its address, and dies. created: when a reader asks; header: after the header of the
record; part: in the middle of a part, after some of its frame; acknowledging: when a reader acknowledges; acknowledged:
when it does so for the second time.
"""

import os
import pathlib
import signal
import sys
import time

from areal_jax.publication.carriers import stream_sender
from areal_jax.publication.carriers.stream_socket import FrameSocket, Kind
from tests.publication.carriers.record_samples import SIZES, make_record
from tests.publication.carriers.stream_proxy import prove_sender


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingSocket(FrameSocket):
    """Dies at its moment."""

    moment = ''
    n_acknowledged = 0

    def receive_prefix(self, *, waits=False):
        prefix = super().receive_prefix(waits=waits)
        if prefix.kind is Kind.NEXT and self.moment == 'created':
            die()
        if prefix.kind is Kind.ACKNOWLEDGE:
            self.n_acknowledged += 1
            if self.n_acknowledged > (self.moment == 'acknowledged'):
                die()
        return prefix

    def send_encoded(self, prefix, payload):
        if len(payload) > 1_000_000 and self.moment == 'part':
            super().send_encoded(prefix, payload[: len(payload) // 2])
            die()
        super().send_encoded(prefix, payload)
        if payload[:9] == b'{"format"' and self.moment == 'header':
            die()


def serve(directory: str, moment: str) -> None:
    DyingSocket.moment = moment
    stream_sender.FrameSocket = DyingSocket
    sender = stream_sender.StreamSender(prove_sender, directory=pathlib.Path(directory))
    os.write(1, f'{moment} {sender.send(make_record(0, SIZES))}\n'.encode())  # in one piece: others write there too
    time.sleep(60)  # a reader ends it
    os._exit(1)


def main() -> None:
    children = []
    for moment in sys.argv[2:]:
        if not (child := os.fork()):
            serve(sys.argv[1], moment)
        children.append(child)
    for child in children:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


if __name__ == '__main__':
    main()
