import socket

import pytest

from areal_jax.config.addresses import address_family, find_free_port, join_address, split_address
from areal_jax.errors import UserError


@pytest.mark.parametrize(('host', 'written'), [('127.0.0.1', '127.0.0.1:80'), ('::1', '[::1]:80'), ('n1', 'n1:80')])
def test_a_host_of_version_6_has_brackets(host, written):
    assert join_address(host, 80) == written


@pytest.mark.parametrize(
    ('text', 'address'),
    [
        ('10.0.0.5', ('10.0.0.5', 0)),
        ('node-3:4711', ('node-3', 4711)),
        ('[::1]', ('::1', 0)),
        ('[::1]:4711', ('::1', 4711)),
        *((wrong, None) for wrong in ('', ':4711', 'node:', 'node:port', '::1', 'node:65536', 'node:-1')),
    ],
)
def test_host_and_port_of_a_text(text, address):
    assert split_address(text) == address


@pytest.mark.parametrize('host', ['127.0.0.1', '::1'])
def test_a_free_port_can_be_listened_at(host):
    with socket.socket(address_family(host)) as listener:
        listener.bind((host, find_free_port(host)))


def test_a_host_elsewhere_is_one_sentence():
    with pytest.raises(UserError, match=r'^--host=192\.0\.2\.1 is no address of this machine \(.*\): name one of its'):
        find_free_port('192.0.2.1')
