"""The address of a server with its protocol, as `rollout.urls` has it: 'vllm+http://host:port'."""

from __future__ import annotations

import re
from collections.abc import Callable

from areal_jax.errors import UserError
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.dialect import Dialect
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import VllmDialect

DIALECTS: dict[str, Callable[[], Dialect]] = {'sglang': SglangDialect, 'vllm': VllmDialect}


def open_address(address: str, api_key: str = '') -> tuple[Dialect, Connection]:
    """How to speak to the server, and the connection to it; raises UserError for what is no address."""
    found = re.fullmatch(r'(\w+)\+(https?://[^/?#\s]+)/?', address)
    if found is None or found[1] not in DIALECTS:
        kinds = ' or '.join(f'{name}+http://host:port' for name in DIALECTS)
        raise UserError(f'{address!r} is no address of a server (rollout.urls): write {kinds}')
    return DIALECTS[found[1]](), Connection(found[2], api_key)
