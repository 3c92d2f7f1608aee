"""The receiver that an address names, on the host of the sender and on another one."""

import contextlib

import pytest

from areal_jax.addresses import CARRIERS, is_carrier_address
from areal_jax.publication.carriers.receivers import SCHEMES, open_receiver
from areal_jax.publication.carriers.receivers import Reader as Settings
from areal_jax.publication.carriers.shm_carrier import ShmReceiver, ShmSender
from areal_jax.publication.carriers.shm_segment import segment_path
from areal_jax.publication.carriers.stream_receiver import StreamReceiver
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.failures import PublicationError
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


def test_an_address_is_no_path():
    assert tuple(SCHEMES) == CARRIERS
    assert all(map(is_carrier_address, ('shm:/dev/shm/a', 'unix:/tmp/s,tcp:node:1', 'tcp:node:1')))
    assert not any(map(is_carrier_address, ('/runs/a/v000001', 'shm/v000001', 'files:/runs/a', '')))


def test_sockets_need_the_key(senders):
    with pytest.raises(PublicationError, match='needs the key of the run: start engine 0 with --workdir'):
        open_receiver(senders[1].address, Settings('engine 0'))
