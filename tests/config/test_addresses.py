import socket

import pytest

from areal_jax.config.addresses import (
    address_family,
    find_free_port,
    is_loopback,
    join_address,
    name_hosts,
    parse_host,
    split_address,
)
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
        *(
            (wrong, None)
            for wrong in ('', ':4711', 'node:', 'node:port', '::1', 'node:65536', 'node:-1', 'node:' + '9' * 5000)
        ),
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


@pytest.mark.parametrize(('authority', 'host'), [
    ('gpu7', 'gpu7'), ('GPU7.:8000', 'gpu7'), ('[::1]:8000', '::1'), ('127.0.0.1:', '127.0.0.1'),
    *((wrong, '') for wrong in ('', ':8000', '::1', 'a@b', 'a/b', 'a b', 'a:b', '[::1', 'gp\u212a7', 'a:1:2', 'http://a')),
])  # fmt: skip
def test_the_host_of_an_authority_as_hosts_are_compared(authority, host):
    assert parse_host(authority) == host


def test_hosts_that_stand_for_all_addresses_name_no_machine():
    assert name_hosts(['', 'GPU7', '0.0.0.0', '::', '10.0.0.5', 'FD00:0::5', 'a:1']) == {'gpu7', '10.0.0.5', 'fd00::5'}


def test_which_hosts_nobody_else_reaches():
    own, others = ('localhost', '127.0.0.1', '127.8.9.1', '::1'), ('', 'localhost.a', '127.1', '0.0.0.0', '10.0.0.1')
    assert [is_loopback(host) for host in (*own, *others)] == [True] * 4 + [False] * 5
