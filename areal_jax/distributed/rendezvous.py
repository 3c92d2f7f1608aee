"""Lets the processes of a run find each other, and wait until each has built its part.

The state of a process, 'built' or 'ended', is in the key-value store of jax's coordination service. Reading it is not
a collective, so an error names a process that ended early, and no process waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import pathlib
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Protocol, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from areal_jax.config.fields import ConfigError
from areal_jax.distributed.handshake import Hello, Listener, connect, key_path, load_key
from areal_jax.distributed.peers import CommandError, Connection
from areal_jax.errors import LostPeerError, UserError

_INVITATION_BYTES = 4096


def invite(host: str, workdir: pathlib.Path, config: str, deadline_s: float) -> list[tuple[str, Connection]]:
    """Connects to all other processes, which call `accept_invitation` meanwhile. For process 0. A collective.

    Args:
      host: the name or address by which the other processes reach this machine.
      workdir: of the run; all processes see it, and it holds the key.
      config: digest of the config of this process.

    Raises LostPeerError if not all connect within `deadline_s`, WireError for a process of another config or version.
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
    """Connects to process 0, which calls `invite`; for every other process. A collective.

    Raises WireError if process 0 has another key, config or code version.
    """
    blank = np.zeros(_INVITATION_BYTES, np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(blank))).decode().strip()
    address, _, path = text.partition('\n')
    hello = Hello(f'follower {jax.process_index()}', config)
    return connect(address, load_key(pathlib.Path(path)), hello, deadline_s).connection


_BUILT, _ENDED = 'built', 'ended'
_WITNESS = 'areal_jax/witness'  # key whose value is the path of a file that process 0 has written
_WITNESS_MS = 1000  # process 0 sets the key before it says that it is built


class _KeyValueStore(Protocol):
    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def join(coordinator: str, processes: int, process_id: int | None, deadline_s: float, *, binds: bool = False) -> bool:
    """Makes this process one of `processes`; True on followers. Call it before anything asks for a device.

    With coordinator='' jax finds the others by itself, as it can on SLURM, GKE and TPU pods. `binds`: process 0 listens
    only at the address `coordinator`, not at every address of its machine.
    Raises LostPeerError if the processes do not find each other, ConfigError if their number is not `processes`.
    """
    if coordinator and process_id is None:
        raise ConfigError(
            f'distributed.coordinator={coordinator!r} needs --process_id, from 0 to {processes - 1}, a different one '
            'for each process'
        )
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator or None,
            num_processes=processes if coordinator else None,
            process_id=process_id if coordinator else None,
            coordinator_bind_address=coordinator if binds and process_id == 0 else None,
            # under SLURM, jax would give a process the one GPU of its local number
            cluster_detection_method='deactivate' if coordinator else None,
            initialization_timeout=int(deadline_s),
        )
    except (RuntimeError, ValueError) as error:
        raise LostPeerError(
            f'distributed.coordinator={coordinator!r}: the processes did not find each other ({error}); start all of '
            'them, and let them reach that address'
        ) from error
    if jax.process_count() != processes:
        raise ConfigError(
            f'cluster.learner has hosts={processes}, and {jax.process_count()} processes have come; set their number'
        )
    atexit.register(_tell, _ENDED)  # runs before jax's own handler, which waits for the others
    return jax.process_index() > 0


def own_host(coordinator: str) -> str:
    """The address of this machine's interface towards the coordinator; '' = the address of this machine's name."""
    if not coordinator:
        return socket.gethostbyname(socket.gethostname())
    host, _, port = coordinator.rpartition(':')
    with socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip('[]'), int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def host_of(coordinator: str) -> str:
    """The name by which the other processes reach this machine; for process 0."""
    return coordinator.rpartition(':')[0] or socket.gethostbyname(socket.gethostname())


@contextlib.contextmanager
def witness(workdir: pathlib.Path) -> Iterator[None]:
    """Keeps a file with a new name in `workdir` while open, for the followers' `require_shared_workdir`."""
    path = workdir.absolute() / f'.seen_by_all_{secrets.token_hex(8)}'
    path.touch()
    try:
        coordination().key_value_set(_WITNESS, str(path))
        yield
    finally:
        path.unlink()


def require_shared_workdir(deadline_s: float) -> pathlib.Path:
    """Waits until process 0 is built; returns its workdir, or raises ConfigError if this follower does not see it.

    Every process writes its shards of a checkpoint to the path that process 0 names.
    Raises CommandError if process 0 ended or takes longer than `deadline_s`.
    """
    _await_built(0, time.monotonic() + deadline_s, deadline_s)
    path = pathlib.Path(coordination().blocking_key_value_get(_WITNESS, _WITNESS_MS))
    if not path.is_file():
        raise ConfigError(
            f'process {jax.process_index()} does not see what process 0 wrote in --workdir={path.parent}: for '
            'checkpoints it must be one directory that all processes share under the same path (NFS, a mounted bucket)'
        )
    return path.parent


def meet(deadline_s: float) -> None:
    """Returns when all processes have built their part; raises CommandError if one ended or takes longer.

    Collectives between CPUs give up after 30 s, but one process may need longer than that to read its weights or
    demonstrations. So all wait here before the first collective.
    """
    _tell(_BUILT)
    end = time.monotonic() + deadline_s
    for index in range(jax.process_count()):
        _await_built(index, end, deadline_s)
    atexit.unregister(_tell)


def _await_built(index: int, end: float, deadline_s: float) -> None:
    try:
        left_ms = int(1000 * max(end - time.monotonic(), 0.001))
        state = coordination().blocking_key_value_get(_key(index), left_ms)
    except jax.errors.JaxRuntimeError as error:
        raise CommandError(
            f'process {index} did not build its part of the run within distributed.command_deadline_s='
            f'{deadline_s:g}: its own output says what it does; raise the deadline if it needs longer'
        ) from error
    if state == _ENDED:
        raise CommandError(f'process {index} ended before the run began; its own output says why')


def _tell(state: str) -> None:
    coordination().key_value_set(_key(jax.process_index()), state, allow_overwrite=True)


def _key(index: int) -> str:
    return f'areal_jax/process/{index}'


def coordination() -> _KeyValueStore:
    """The client of jax's coordination service, for which jax has no public name (docs/design/private_names.md)."""
    from jax._src import distributed

    return cast(_KeyValueStore, distributed.global_state.client)
