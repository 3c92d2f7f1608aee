"""The registry of a run: a directory in which servers say where they serve, and that they are alive.

    WORKDIR/registry/NAME/server.json    replaced by an atomic rename; its time of change is the heartbeat
    WORKDIR/registry/NAME/.lock          held by the server for its life: no two servers have one name

A server registers with `Registration`, registry_watch.py reads. No clock is compared with that of another machine: a
reader only sees that a heartbeat has changed.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.rollout.servers.fit import SAYS_NOTHING, ServerFacts

REGISTRY = 'registry'  # in the workdir
_ENTRY = 'server.json'
_FIX = 'remove the directory, and start the server again'


@dataclasses.dataclass(frozen=True)
class ServerEntry:
    """What a server says of itself."""

    name: str
    incarnation: int  # counts the servers of this name, from 1
    url: str  # 'http://host:port'
    kind: str  # which client speaks to it: 'own', 'vllm', 'sglang'
    process: int
    is_leaving: bool = False  # it takes no further requests
    heartbeat: int | None = None  # changes while the server lives; None: it has none (rollout.urls)
    facts: ServerFacts = SAYS_NOTHING


class Registration:
    """The entry of this process; nobody else can register the name while it lives.

    Raises UserError where another server has the name.
    """

    def __init__(self, workdir: pathlib.Path, name: str, url: str, kind: str, facts: ServerFacts = SAYS_NOTHING):
        directory = workdir / REGISTRY / name
        try:
            self._lock = files.DirectoryLock(directory)
        except UserError as error:
            raise UserError(f'a server called {name!r} is registered already ({error}); choose another name') from error
        self._path = directory / _ENTRY
        earlier = read_entry(self._path)
        incarnation = 1 if earlier is None else earlier.incarnation + 1
        self.entry = ServerEntry(name, incarnation, url, kind, os.getpid(), facts=facts)
        self._write()

    def beat(self) -> None:
        """Says that this process is alive; several times in the reader's patience (registry_watch.py)."""
        os.utime(self._path)

    def note_leaving(self) -> None:
        """Asks for no further requests."""
        self.entry = dataclasses.replace(self.entry, is_leaving=True)
        self._write()

    def close(self) -> None:
        """Gives the name back; the entry stays and says that its server is leaving."""
        if not self.entry.is_leaving:
            self.note_leaving()
        self._lock.release()

    def _write(self) -> None:
        fields = dataclasses.asdict(self.entry)
        del fields['heartbeat']
        files.write_json(self._path, fields)


def read_entry(path: pathlib.Path) -> ServerEntry | None:
    """The entry in a file; None where there is none yet. Raises FileError for anything else."""
    try:
        heartbeat = path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    fields: files.JsonObject = {'facts': {}} | files.read_json(path, _FIX)
    types = {'name': str, 'incarnation': int, 'url': str, 'kind': str, 'process': int, 'is_leaving': bool}
    for name, kind in (types | {'facts': dict}).items():
        if type(fields.get(name)) is not kind:
            raise files.FileError(f'{path} has {name}={fields.get(name)!r}, where {kind.__name__} is expected; {_FIX}')
    known = {field.name for field in dataclasses.fields(ServerFacts)}
    facts = ServerFacts(**{name: value for name, value in fields['facts'].items() if name in known})
    return ServerEntry(**{name: fields[name] for name in types}, heartbeat=heartbeat, facts=facts)


def read_registry(workdir: pathlib.Path) -> list[ServerEntry]:
    """The entries by name; a directory whose server has not written yet has none."""
    directory = workdir / REGISTRY
    names = sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    found = [read_entry(path / _ENTRY) for path in names]
    return [entry for entry in found if entry is not None]
