"""Opens the connections between process 0 and the followers. Used by app/processes.py; uses jax's collectives.

The address and a random key are broadcast by jax, so only processes of the run can connect. Plain sockets carry
everything after that: unlike a broadcast of jax, they show at once that a process is gone.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from multiprocessing.connection import Client, Connection, Listener

import jax
import numpy as np
from jax.experimental import multihost_utils

from areal_jax.distributed.peers import CommandError

_INVITATION_BYTES = 512


def invite(host: str, deadline_s: float) -> list[Connection]:
    """Connections to all other processes, which call `accept_invitation` meanwhile. For process 0. A collective.

    `host` is the name or address of this machine as the others know it.
    Raises CommandError when not all have come within `deadline_s`.
    """
    key = secrets.token_bytes(32)
    with Listener((host, 0), authkey=key, backlog=jax.process_count()) as listener:
        text = f'{host}\n{listener.address[1]}\n{key.hex()}'.encode()
        multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(_INVITATION_BYTES), np.uint8))
        return _accept_all(listener, jax.process_count() - 1, deadline_s)


def accept_invitation() -> Connection:
    """The connection to process 0, which calls `invite`; for every other process. A collective."""
    blank = np.zeros(_INVITATION_BYTES, np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(blank))).decode().strip()
    host, port, key = text.split('\n')
    return Client((host, int(port)), authkey=bytes.fromhex(key))


def _accept_all(listener: Listener, count: int, deadline_s: float) -> list[Connection]:
    accepted: queue.Queue[Connection] = queue.Queue()

    def accept() -> None:
        for _ in range(count):
            accepted.put(listener.accept())

    threading.Thread(target=accept, daemon=True).start()
    end = time.monotonic() + deadline_s
    connections: list[Connection] = []
    while len(connections) < count:
        try:
            connections.append(accepted.get(timeout=max(end - time.monotonic(), 0.0)))
        except queue.Empty:
            raise CommandError(
                f'{count - len(connections)} of {count} followers did not come within {deadline_s:g} s: start all '
                'processes of the run, and let them reach process 0'
            ) from None
    return connections
