"""Headers that lie end in the error of the reader, whichever number, text or nesting they have."""

import contextlib
import json
import socket
import struct
import threading
import zlib

import pytest

from areal_jax.publication.carriers.files_carrier import read_base, read_delta, write_delta
from areal_jax.publication.carriers.shm_carrier import (
    ReaderRow,
    ShmReceiver,
    ShmSender,
    count_bytes,
    read_entries,
    read_record,
    read_row,
    write_record,
)
from areal_jax.publication.carriers.shm_segment import create_segment, segment_path
from areal_jax.publication.carriers.stream_receiver import StreamReceiver
from areal_jax.publication.carriers.stream_socket import (
    FrameError,
    FrameSocket,
    Hello,
    Kind,
    Request,
    decode_held,
    decode_hello,
    decode_request,
    encode_held,
    encode_hello,
    encode_prefix,
    encode_request,
)
from areal_jax.publication.manifest import LeafDigest
from areal_jax.publication.record import Held, RecordHeader, decode_header
from areal_jax.publication.versions import PublicationError
from tests.lying_headers import list_lies
from tests.publication.carriers.record_samples import held, make_chain, make_record

HELD = Held(3, 'ab')
READERS = {
    'hello': (decode_hello, encode_hello(Hello('engine 0', HELD)), FrameError),
    'request': (decode_request, encode_request(Request(4, HELD, Held(4, 'cd'), 2, 9)), FrameError),
    'held': (decode_held, encode_held(HELD), FrameError),
    'whole': (decode_header, make_record(7, (3, 0)).header.encode(), PublicationError),
    'delta': (decode_header, make_chain(7, (3, 0), 1, (2, 0))[1].header.encode(), PublicationError),
}


@pytest.mark.parametrize('reader', READERS)
def test_a_lie_is_refused_or_can_be_said_again(reader):
    decode, content, expected = READERS[reader]
    refused = 0
    for lie in list_lies(json.loads(content)):
        try:
            found = decode(lie)
        except expected:
            refused += 1
            continue
        _say_again(found)
    assert refused > 50


def _say_again(found):
    """What was taken fits into frames and rows."""
    if isinstance(found, RecordHeader):
        assert sum(found.sizes) < 1 << 20
        encode_prefix(Kind.HEADER, b'', found.version)
        decode_header(found.encode())
    elif isinstance(found, Request):
        encode_prefix(Kind.HEADER, b'', found.version, found.leaf, found.offset)
        str(found).encode()
    else:
        one = found.held if isinstance(found, Hello) else found
        ReaderRow('x', held=one).write(memoryview(bytearray(256)))
        str(found).encode()


@pytest.mark.parametrize(
    ('shape', 'sizes'), [((1 << 45,), (1 << 45,)), ((1 << 40, 1 << 40), (1 << 80,)), ((2,), (1 << 62,)), ((4,), (3,))]
)
def test_a_record_larger_than_memory_is_refused(tmp_path, shape, sizes):
    """Told by its leaves too, or by its sizes alone."""
    header = RecordHeader(7, {'a': LeafDigest(shape, 'uint8', (0, 0))}, sizes)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / 's'))
        listener.listen()
        thread = threading.Thread(target=_send_header, args=(listener, header))
        thread.start()
        receiver = StreamReceiver(f'unix:{tmp_path}/s', 'engine 0', lambda own: None)
        with pytest.raises(PublicationError, match=r'no memory for them|a part of|no list of sizes'):
            receiver.fetch(7, None, lambda record: None)
        thread.join()
        receiver.close()


def _send_header(listener, header):
    own, _ = listener.accept()
    connection = FrameSocket(own, 5.0)
    for _ in range(2):  # HELLO, NEXT
        connection.receive_payload(connection.receive_prefix())
    connection.send(Kind.HEADER, header.encode(), header.version)
    own.close()


def _place_with(record):
    encoded = record.header.encode()
    place = memoryview(bytearray(count_bytes(encoded, record.header.sizes) + 64))
    write_record(place, 0, record, encoded)
    return place


@pytest.mark.parametrize('field', range(4))
@pytest.mark.parametrize('value', [0, 1, 1 << 20, (1 << 63) - 1])
def test_a_lying_prefix_in_shared_memory_is_refused(field, value):
    """A version, bytes of the header, bytes to the next record, a digest: with a checksum that fits."""
    form, record = struct.Struct('<8sqQQ64sI'), make_record(7, (3, 0))
    place = _place_with(record)
    magic, *fields = form.unpack_from(place)
    fields[field] = b'\xff' * 64 if field == 3 else value
    place[: form.size] = form.pack(magic, *fields)
    place[form.size : form.size + 4] = struct.pack('<I', zlib.crc32(place[: form.size]))
    with contextlib.suppress(PublicationError):
        entries = read_entries(place, 1 << 40 if field == 2 else 1)
        assert len(entries) == 1
        read_record(place, entries[0])


def test_a_row_of_a_reader_that_lies_is_no_name():
    form, row = struct.Struct('<I116sQqq64s'), memoryview(bytearray(256))
    for size, name, digest in ((4, b'\xff\xfe\xfd\xfc', b'ab'), (1 << 31, b'engine', b'\xff'), (3, b'abc', b'\xe0')):
        content = form.pack(size, name, 1, 2, 3, digest)
        row[: form.size + 4] = content + struct.pack('<I', zlib.crc32(content))
        assert read_row(row) is not None


@pytest.mark.parametrize('word', [3, 4, 5])
@pytest.mark.parametrize('value', [1 << 20, (1 << 63) - 1, (1 << 64) - 1])
def test_a_segment_whose_control_lies_is_refused(tmp_path, word, value):
    """Bytes of a place, places, the newest one."""
    path = segment_path('run', '1', tmp_path)
    with contextlib.closing(ShmSender(path)) as sender:
        record = make_record(7, (3, 0))
        sender.send(record)
        receiver = ShmReceiver(path, 'engine 0')
        with path.open('r+b') as file:
            file.seek(8 * word)
            kept = file.read(8)
            file.seek(8 * word)
            file.write(value.to_bytes(8, 'little'))
            file.flush()
            with contextlib.suppress(PublicationError):
                receiver.fetch(7, None, lambda record: None)
                assert word == 5 or value == 1 << 20  # the chain is found all the same
            file.seek(8 * word)
            file.write(kept)
        receiver.close()


def test_the_number_of_records_of_a_chain_may_lie(tmp_path):
    segment = create_segment(segment_path('run', '1', tmp_path))
    segment.allocate(1 << 12, 2)
    segment.set_n_records(0, (1 << 64) - 1)
    with pytest.raises(PublicationError, match='damaged'):
        read_entries(memoryview(segment.map_place(0)), segment.n_records(0))
    segment.end()
    segment.close()


def test_a_file_of_a_delta_that_lies_is_refused(tmp_path):
    """Also with a checksum that fits."""
    chain, path = make_chain(7, (3, 0), 1, (2, 0)), tmp_path / 'v000008.delta'
    write_delta(path, chain[1])
    content = path.read_bytes()
    start = 8 + 4 + 20
    length = int.from_bytes(content[28:32], 'little')
    for lie in list_lies(json.loads(content[start : start + length])):
        body = content[12:28] + len(lie).to_bytes(4, 'little') + lie + content[start + length :]
        path.write_bytes(content[:8] + zlib.crc32(body).to_bytes(4, 'little') + body)
        with contextlib.suppress(PublicationError):
            assert held(read_delta(path, 8)) is not None
        assert read_base(path) == 7
