"""Opens the connections between process 0 and the followers of a run without a controller of its own.

Process 0 listens; jax's collectives only carry its address and the path of the key, because jax.distributed does not
say who takes part. Plain sockets carry everything after that: unlike a broadcast of jax, they show at once that a
process is gone.
"""

from __future__ import annotations

import pathlib
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from areal_jax.distributed.handshake import Hello, Listener, connect, key_path, load_key
from areal_jax.distributed.peers import Connection
from areal_jax.errors import UserError

_INVITATION_BYTES = 4096


def invite(host: str, workdir: pathlib.Path, config: str, deadline_s: float) -> list[tuple[str, Connection]]:
    """Connections to all other processes, which call `accept_invitation` meanwhile. For process 0. A collective.

    Args:
      host: the name or address of this machine as the others know it.
      workdir: of the run, which all processes see; holds the key.
      config: digest of the config of this process.

    Raises LostPeerError when not all have come within `deadline_s`, WireError for one of another config or version.
    """
    path = key_path(workdir)
    with Listener(host, 0, load_key(path), Hello('process 0', config)) as listener:
        text = f'{listener.address}\n{path}'.encode()
        if len(text) > _INVITATION_BYTES:
            raise UserError(f'--workdir={workdir} is too long a path: choose a shorter one')
        multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(_INVITATION_BYTES), np.uint8))
        end = time.monotonic() + deadline_s
        met = [listener.accept(end - time.monotonic()) for _ in range(jax.process_count() - 1)]
    return sorted(((each.hello.role, each.connection) for each in met), key=lambda each: int(each[0].split()[-1]))


def accept_invitation(config: str, deadline_s: float) -> Connection:
    """The connection to process 0, which calls `invite`; for every other process. A collective.

    Raises WireError where process 0 has another key, config or code version.
    """
    blank = np.zeros(_INVITATION_BYTES, np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(blank))).decode().strip()
    address, _, path = text.partition('\n')
    hello = Hello(f'follower {jax.process_index()}', config)
    return connect(address, load_key(pathlib.Path(path)), hello, deadline_s).connection
