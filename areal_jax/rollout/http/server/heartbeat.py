"""Keeps the entry of a server in the registry of its run alive."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
import urllib.parse

from areal_jax.rollout.servers.fit import SAYS_NOTHING, ServerFacts
from areal_jax.rollout.servers.registry import Registration

KIND = 'own'  # which client speaks to this server
_PERIOD_S = 1.0


class Heartbeat:
    """A context manager: inside, the server is registered and its heartbeat goes on.

    Raises UserError where a server of this name lives.
    """

    def __init__(self, workdir: pathlib.Path, url: str, name: str | None = None, facts: ServerFacts = SAYS_NOTHING):
        self._registration = Registration(workdir, name or name_server(url), reachable(url), KIND, facts)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name='heartbeat', daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._registration.close()

    def note_leaving(self) -> None:
        """No further requests are taken."""
        self._registration.note_leaving()

    def _beat(self) -> None:
        while not self._end.wait(_PERIOD_S):
            with contextlib.suppress(OSError):  # a file system that is away for a while: the next beat may succeed
                self._registration.beat()


def name_server(url: str) -> str:
    """'host-8000': unique, since no two processes of a host have one port."""
    return f'{socket.gethostname()}-{urllib.parse.urlsplit(url).port}'


def reachable(url: str) -> str:
    """The URL with the name of this host where the server listens on all addresses."""
    parts = urllib.parse.urlsplit(url)
    if parts.hostname not in ('0.0.0.0', '::'):
        return url
    return f'http://{socket.gethostname()}:{parts.port}'
