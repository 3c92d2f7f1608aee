"""Addresses of this machine, IPv4 or IPv6, at which processes of a run listen."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from areal_jax.errors import UserError

OWN_HOST = 'own'  # publication.listen: every process of a learner listens at the address of its machine
ALL_ADDRESSES = ('0.0.0.0', '::')  # a server that listens there accepts connections on all interfaces
_MOST_PORT, _PORT_DIGITS = 65535, 5
_AUTHORITY = re.compile(r'(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(?::[0-9]*)?', re.ASCII | re.IGNORECASE)


def join_address(host: str, port: int) -> str:
    """Returns 'host:port', with brackets around an IPv6 host."""
    return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def split_address(text: str) -> tuple[str, int] | None:
    """Returns (host, port) of 'host', 'host:port', '[v6]' or '[v6]:port'; no port: 0. Returns None for other texts."""
    has_port = ':' in text and not text.endswith(']')
    host, port = text.rsplit(':', 1) if has_port else (text, '0')
    if not host or not port.isdecimal() or (':' in host and not host.startswith('[')):
        return None
    if len(port) > _PORT_DIGITS or int(port) > _MOST_PORT:
        return None
    return host.strip('[]'), int(port)


def parse_host(authority: str) -> str:
    """The host of 'host', 'host:port', '[v6]' or '[v6]:port', normalised for comparison; '' for any other text."""
    match = _AUTHORITY.fullmatch(authority)
    return match[1].lower().strip('[]').removesuffix('.') if match else ''


def name_hosts(names: Iterable[str]) -> frozenset[str]:
    """Normalises names and addresses for comparison; leaves out ALL_ADDRESSES and texts that are neither."""
    return frozenset(host for host in map(_parse_name, names) if host and host not in ALL_ADDRESSES)


def _parse_name(name: str) -> str:
    try:
        return ipaddress.ip_address(name).compressed
    except ValueError:
        return '' if ':' in name else parse_host(name)


def is_loopback(host: str) -> bool:
    """Whether a host from `parse_host` is a loopback address, which no other machine reaches: 127.0.0.0/8, ::1."""
    try:
        return host == 'localhost' or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_family(host: str) -> socket.AddressFamily:
    """The address family of a socket that listens at the host."""
    return socket.AF_INET6 if ':' in host else socket.AF_INET


def find_free_port(host: str) -> int:
    """Returns a free port; raises UserError for a host that is not an address of this machine."""
    with socket.socket(address_family(host), socket.SOCK_STREAM) as free:
        try:
            free.bind((host, 0))
        except OSError as error:
            raise UserError(
                f'--host={host} is no address of this machine ({error.strerror}): name one of its interfaces'
            ) from error
        return int(free.getsockname()[1])
