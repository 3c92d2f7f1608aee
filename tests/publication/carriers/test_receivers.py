"""What every carrier does, through the receiver that an address names, on the host of the sender and on another one."""

import contextlib

import pytest

from areal_jax.publication.carriers.shm_carrier import ShmReceiver, ShmSender
from areal_jax.publication.carriers.shm_segment import segment_path
from areal_jax.publication.carriers.stream_receiver import Reader as Settings
from areal_jax.publication.carriers.stream_receiver import (
    StreamReceiver,
    open_receiver,
    parse_version_name,
)
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.record import Held
from areal_jax.publication.versions import PublicationError, name_version
from tests.publication.carriers.record_samples import Reader, assert_got, held, make_chain, make_record
from tests.publication.carriers.stream_proxy import prove_reader, prove_sender

ENGINE = Settings('engine 0', prove_reader)
SMALL = (0, 1, 255, 256, 70_000)


@pytest.fixture(params=['shm', 'unix', 'tcp'])
def carrier(request, tmp_path):
    """(a sender, a function that opens a receiver of the kind at its address)."""
    with contextlib.ExitStack() as opened:
        if request.param == 'shm':
            made = ShmSender(segment_path('run', '1', tmp_path))
        else:
            made = StreamSender(prove_sender, '127.0.0.1', directory=tmp_path)
        sender = opened.enter_context(contextlib.closing(made))

        def open_(address, name='engine 0'):
            (own,) = (each for each in address.split(',') if each.startswith(f'{request.param}:'))
            receiver = open_receiver(own, Settings(name, prove_reader))
            assert isinstance(receiver, ShmReceiver if request.param == 'shm' else StreamReceiver)
            return opened.enter_context(contextlib.closing(receiver))

        yield sender, open_


def test_records_arrive_as_they_were_sent(carrier):
    (sender, open_), chain, reader = carrier, make_chain(7), Reader()
    (address,) = {sender.send(record) for record in chain}
    open_(address).fetch(9, None, reader)
    assert_got(reader, chain)


def test_a_reader_that_holds_a_version_gets_the_deltas_after_it(carrier):
    (sender, open_), chain, reader, joiner = carrier, make_chain(7), Reader(), Reader()
    address = sender.send(chain[0])
    receiver = open_(address)
    receiver.fetch(7, None, reader)
    sender.send(chain[1])
    sender.send(chain[2])
    receiver.fetch(9, held(chain[0]), reader)  # two deltas were missed
    assert_got(reader, chain)
    receiver.fetch(9, held(chain[2]), reader)
    assert len(reader.records) == 3  # nothing is missing
    open_(address, 'engine 1').fetch(8, None, joiner)  # joins in the middle of the chain
    assert_got(joiner, chain[:2])


@pytest.mark.parametrize(('pinned', 'kept'), [([], '4 and 5'), ([1], '1, 4 and 5')])
def test_versions_follow_each_other_and_what_is_not_pinned_goes(carrier, pinned, kept):
    (sender, open_), reader = carrier, Reader()
    records = [make_record(version, SMALL) for version in range(6)]
    receiver = open_(sender.send(records[0]))
    for record in records:
        if record is not records[0]:
            sender.send(record)
        receiver.fetch(record.header.version, None, reader)
        sender.release(record.header.version, pinned=pinned)
    assert_got(reader, records)
    with pytest.raises(PublicationError, match=rf'version 3 .* has versions {kept}:'):
        receiver.fetch(3, None, reader)
    for version in (*pinned, 5):
        receiver.fetch(version, None, again := Reader())
        assert_got(again, [records[version]])


def test_nothing_can_be_written_through_a_part(carrier):
    sender, open_ = carrier
    receiver = open_(sender.send(make_record(0, SMALL)))

    def write(record):
        record.parts[-1][0] = 1

    with pytest.raises(TypeError, match='read-only'):
        receiver.fetch(0, None, write)


def test_another_host_takes_the_network(tmp_path):
    """There the path of the Unix socket is not."""
    record, reader = make_record(3), Reader()
    with contextlib.closing(StreamSender(prove_sender, '127.0.0.1', directory=tmp_path)) as sender:
        _, tcp = sender.send(record).split(',')
        with contextlib.closing(open_receiver(f'unix:/nowhere/s,{tcp}', ENGINE)) as receiver:
            receiver.fetch(3, None, reader)
    assert_got(reader, [record])


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
    assert parse_version_name(name_version(address, 7, 'ab12')) == (address, Held(7, 'ab12'))


@pytest.mark.parametrize(
    'path', ['/runs/a/v000001', 'shm/v000001', 'files:/runs/a#1@ab', '', '/runs/#1@ab', 'shm:/a#b']
)
def test_a_path_is_no_version_at_an_address(path):
    assert parse_version_name(path) is None


def test_sockets_need_the_key(tmp_path):
    with (
        contextlib.closing(StreamSender(prove_sender, '127.0.0.1', directory=tmp_path)) as sender,
        pytest.raises(PublicationError, match='needs the key of the run: start engine 0 with --workdir'),
    ):
        open_receiver(sender.address, Settings('engine 0'))
