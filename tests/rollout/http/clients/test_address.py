"""Addresses of servers with their protocol."""

import pytest

from areal_jax.errors import UserError
from areal_jax.rollout.http.clients.address import open_address
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import VllmDialect


@pytest.mark.parametrize(
    ('address', 'dialect', 'url'),
    [
        ('vllm+http://127.0.0.1:8000', VllmDialect, 'http://127.0.0.1:8000'),
        ('sglang+https://host.example:30000/', SglangDialect, 'https://host.example:30000'),
    ],
)
def test_an_address_names_the_protocol_and_the_server(address, dialect, url):
    found, connection = open_address(address)
    assert (type(found), connection.url) == (dialect, url)


@pytest.mark.parametrize('address', ['', 'http://host:1', 'vllm+host:1', 'other+http://host:1', 'vllm+http://host/v1'])
def test_what_is_no_address_is_refused_by_its_value(address):
    with pytest.raises(UserError, match=r"' is no address of a server \(rollout.urls\): write sglang\+http") as refused:
        open_address(address)
    assert repr(address) in str(refused.value)
