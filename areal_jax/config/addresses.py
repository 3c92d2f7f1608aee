"""Addresses of this machine, of either version of the internet protocol, as processes of a run listen at them."""

from __future__ import annotations

import socket

from areal_jax.errors import UserError

_MOST_PORT = 65535


def join_address(host: str, port: int) -> str:
    """'host:port', with brackets around a host of version 6."""
    return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def split_address(text: str) -> tuple[str, int] | None:
    """(host, port) of 'host', 'host:port', '[v6]' or '[v6]:port'; port 0 where none is named. None for other texts."""
    has_port = ':' in text and not text.endswith(']')
    host, port = text.rsplit(':', 1) if has_port else (text, '0')
    if not host or not port.isdecimal() or int(port) > _MOST_PORT or (':' in host and not host.startswith('[')):
        return None
    return host.strip('[]'), int(port)


def address_family(host: str) -> socket.AddressFamily:
    """Of a socket that listens at the host."""
    return socket.AF_INET6 if ':' in host else socket.AF_INET


def find_free_port(host: str) -> int:
    """A free port; raises UserError for a host that is not an address of this machine."""
    with socket.socket(address_family(host), socket.SOCK_STREAM) as free:
        try:
            free.bind((host, 0))
        except OSError as error:
            raise UserError(
                f'--host={host} is no address of this machine ({error.strerror}): name one of its interfaces'
            ) from error
        return int(free.getsockname()[1])
