"""The key that clients send to servers: the one that the user sets, else that of a run, which its processes share."""

from __future__ import annotations

import os
import pathlib
import socket

from areal_jax.config.addresses import is_loopback
from areal_jax.distributed.handshake import load_key
from areal_jax.errors import UserError

API_KEY = 'AREAL_JAX_API_KEY'  # environment variable: a flag could be read by every user of the machine
_FILE = 'registry/api_key'  # in the workdir, readable by its owner alone


def find_key(workdir: pathlib.Path | None = None) -> str:
    """The value of the variable; without one, the key of the run, which the first of its processes makes.

    '' where there is neither. Raises KeyFileError for a file that others could read.

    Args:
      workdir: of the run; None where there is none.
    """
    if given := os.environ.get(API_KEY, ''):
        return given
    return '' if workdir is None else load_key(workdir.absolute() / _FILE).hex()


def require_key(listener: socket.socket, api_key: str, *, is_insecure: bool) -> None:
    """Raises UserError for a server without a key that other machines reach, unless that is meant."""
    host = listener.getsockname()[0]
    if not api_key and not is_insecure and not is_loopback(host):
        raise UserError(
            f'--host={host} lets other machines reach this server, and without a key any of them controls it: set '
            f'{API_KEY}, or add --insecure'
        )
