"""Addresses of servers with their protocol."""

import pytest

from areal_jax.config.kinds import EXTERNAL, OWN_CLIENT
from areal_jax.errors import UserError
from areal_jax.rollout.servers.server_entries import read_address


@pytest.mark.parametrize(
    ('address', 'kind', 'url'),
    [
        ('vllm+http://127.0.0.1:8000', 'vllm', 'http://127.0.0.1:8000'),
        ('sglang+https://host.example:30000/', 'sglang', 'https://host.example:30000'),
    ],
)
def test_an_address_names_the_protocol_and_the_server(address, kind, url):
    entry = read_address(address, EXTERNAL.clients)
    assert (entry.kind, entry.url) == (kind, url)


def test_a_kind_without_addresses_is_none_of_them():
    with pytest.raises(UserError, match=r'is no address'):
        read_address('own+http://host:1', [*EXTERNAL.clients, OWN_CLIENT])


@pytest.mark.parametrize('address', ['', 'http://host:1', 'vllm+host:1', 'other+http://host:1', 'vllm+http://host/v1'])
def test_what_is_no_address_is_refused_by_its_value(address):
    with pytest.raises(UserError, match=r"' is no address of a server \(rollout.urls\): write sglang\+http") as refused:
        read_address(address, EXTERNAL.clients)
    assert repr(address) in str(refused.value)
