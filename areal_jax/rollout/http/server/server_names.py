"""The name of a server in the registry of its run, and the address at which other processes reach it."""

from __future__ import annotations

import socket
import urllib.parse

from areal_jax.config.addresses import ALL_ADDRESSES


def name_server(url: str) -> str:
    """Returns a name like 'host-8000': unique, because no two processes of a host share a port."""
    return f'{socket.gethostname()}-{urllib.parse.urlsplit(url).port}'


def reachable(url: str) -> str:
    """Returns the URL, with the name of this host if the server listens on all addresses."""
    parts = urllib.parse.urlsplit(url)
    if parts.hostname not in ALL_ADDRESSES:
        return url
    return f'http://{socket.gethostname()}:{parts.port}'
