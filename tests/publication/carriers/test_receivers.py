"""The receiver that an address names, on the host of the sender and on another one."""

import contextlib

import pytest

from areal_jax.publication.carriers.shm_carrier import ShmReceiver, ShmSender
from areal_jax.publication.carriers.shm_segment import segment_path
from areal_jax.publication.carriers.stream_receiver import Reader as Settings
from areal_jax.publication.carriers.stream_receiver import (
    StreamReceiver,
    name_version,
    open_receiver,
    parse_version_name,
)
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.record import Held
from areal_jax.publication.versions import PublicationError
from tests.publication.carriers.record_samples import Reader, assert_got, make_record
from tests.publication.carriers.stream_proxy import prove_reader, prove_sender

ENGINE = Settings('engine 0', prove_reader)


@pytest.fixture
def senders(tmp_path):
    with (
        contextlib.closing(ShmSender(segment_path('run', '1', tmp_path))) as shm,
        contextlib.closing(StreamSender(prove_sender, '127.0.0.1', directory=tmp_path)) as stream,
    ):
        yield shm, stream


def test_an_address_opens_the_carrier_that_it_names(senders):
    record = make_record(3)
    for sender, kind in zip(senders, (ShmReceiver, StreamReceiver), strict=True):
        receiver, reader = open_receiver(sender.send(record), ENGINE), Reader()
        assert isinstance(receiver, kind)
        receiver.fetch(3, None, reader)
        assert_got(reader, [record])
        receiver.close()


def test_another_host_takes_the_network(senders):
    """There the path of the Unix socket is not."""
    record, reader = make_record(3), Reader()
    _, tcp = senders[1].send(record).split(',')
    receiver = open_receiver(f'unix:/nowhere/s,{tcp}', ENGINE)
    receiver.fetch(3, None, reader)
    assert_got(reader, [record])
    receiver.close()


@pytest.mark.parametrize(
    ('address', 'match'),
    [
        (
            'shm:/dev/shm/areal_jax-elsewhere',
            r"not on this host, where engine 0 reads.*'stream' with publication.listen",
        ),
        ('unix:/nowhere/s', '/nowhere/s is not on this host'),
        ('pigeon:coop', r"'pigeon:coop' is no address of weights; it must begin with one of shm:, unix:, tcp:: start"),
        ('', "'' is no address of weights"),
    ],
)
def test_an_address_that_leads_nowhere(address, match):
    with pytest.raises(PublicationError, match=match):
        open_receiver(address, ENGINE)


@pytest.mark.parametrize('address', ['shm:/dev/shm/a', 'unix:/tmp/s,tcp:node:1', 'tcp:node:1', 'unix:/tmp/a#b'])
def test_a_version_at_an_address_has_a_name(address):
    assert parse_version_name(name_version(address, Held(7, 'ab12'))) == (address, Held(7, 'ab12'))


@pytest.mark.parametrize(
    'path', ['/runs/a/v000001', 'shm/v000001', 'files:/runs/a#1@ab', '', '/runs/#1@ab', 'shm:/a#b']
)
def test_a_path_is_no_version_at_an_address(path):
    assert parse_version_name(path) is None


def test_sockets_need_the_key(senders):
    with pytest.raises(PublicationError, match='needs the key of the run: start engine 0 with --workdir'):
        open_receiver(senders[1].address, Settings('engine 0'))
