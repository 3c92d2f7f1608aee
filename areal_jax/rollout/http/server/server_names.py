"""How a server is called in the registry of its run, and under which address others reach it."""

from __future__ import annotations

import socket
import urllib.parse

from areal_jax.config.addresses import ALL_ADDRESSES


def name_server(url: str) -> str:
    """'host-8000': unique, since no two processes of a host have one port."""
    return f'{socket.gethostname()}-{urllib.parse.urlsplit(url).port}'


def reachable(url: str) -> str:
    """The URL with the name of this host where the server listens on all addresses."""
    parts = urllib.parse.urlsplit(url)
    if parts.hostname not in ALL_ADDRESSES:
        return url
    return f'http://{socket.gethostname()}:{parts.port}'
