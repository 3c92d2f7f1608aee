"""Deltas beside whole versions on a disk: chains, damage, removal, and the death of the writer."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from areal_jax import files
from areal_jax.publication.carriers.files_carrier import FilesReceiver, FilesSender, read_base, read_delta, write_delta
from areal_jax.publication.files_channel import FilesChannel, find_version, load_version
from areal_jax.publication.record_channel import WeightsReader
from areal_jax.publication.versions import PublicationError, keep_while_read
from tests.publication.bits16 import Carrier, first_version, held_of, make_versions, next_version, open_channel, over
from tests.publication.tiny import CONFIG, assert_bit_equal

ROOT = pathlib.Path(__file__).parents[3]
DEVICE = jax.devices()[0]
KILLED = """
import os, pathlib, signal, sys
from tests.publication.bits16 import make_versions, open_channel

channel = open_channel(sys.argv[1], base_every=int(sys.argv[2]))
one, two = make_versions(2, share=0.001)
channel.transfer(0, one)
pathlib.Path.rename = pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
channel.transfer(1, two)
"""


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != 'readers')


def publish(directory, count, **options):
    channel, versions = open_channel(directory, **options), make_versions(count, share=0.001)
    return channel, versions, [channel.transfer(version, params) for version, params in enumerate(versions)]


def read(directory, version, held=None):
    return WeightsReader(FilesReceiver(directory, CONFIG), DEVICE).receive(version)[0]


def test_versions_arrive_through_files(tmp_path):
    channel, versions, published = publish(tmp_path / 'new', 4, base_every=3)
    handles = [pathlib.Path(one.handle).relative_to(tmp_path / 'new').name for one in published]
    assert handles == ['v000000', 'v000001.delta', 'v000002.delta', 'v000003']
    for version, one in enumerate(published):
        assert_bit_equal(channel.receive(one), versions[version])


def test_a_whole_version_is_the_directory_that_servers_load(tmp_path):
    """Byte for byte what the channel without deltas writes."""
    params = first_version()
    with_deltas = open_channel(tmp_path / 'with').transfer(3, params)
    without = FilesChannel(tmp_path / 'without', CONFIG, verify=True).transfer(3, params)
    for path in pathlib.Path(without.handle).iterdir():
        assert (pathlib.Path(with_deltas.handle) / path.name).read_bytes() == path.read_bytes()
    found = find_version(with_deltas.handle, 3)
    assert_bit_equal(load_version(found, CONFIG, verify=True), params)


def test_a_joiner_in_the_middle_of_a_chain(tmp_path):
    _, versions, _ = publish(tmp_path, 5)
    for version in (4, 2, 0):
        assert_bit_equal(read(tmp_path, version), versions[version])


def test_the_sender_knows_what_readers_hold(tmp_path):
    channel, versions, published = publish(tmp_path, 3)
    sender = FilesSender(tmp_path, CONFIG)
    assert sender.held() == {}
    channel.receive(published[1])
    other = WeightsReader(FilesReceiver(tmp_path, CONFIG, 'engine/7'), DEVICE)
    other.receive(2)
    assert sender.held() == {'reader': held_of(versions[1], 1), 'engine_7': held_of(versions[2], 2)}
    (tmp_path / 'readers' / 'reader.json').write_text('{"version": ')
    assert list(sender.held()) == ['engine_7']


def test_a_base_stays_while_a_chain_needs_it(tmp_path):
    channel, _, _ = publish(tmp_path, 4)
    channel.release(3)
    assert names(tmp_path) == ['v000000', 'v000001.delta', 'v000002.delta', 'v000003.delta']


def test_a_chain_goes_when_nothing_needs_it(tmp_path):
    channel, versions, _ = publish(tmp_path, 9, base_every=3)  # whole: 0, 3, 6
    channel.release(8, pinned=(4,))
    assert names(tmp_path) == ['v000003', 'v000004.delta', *('v000006', 'v000007.delta', 'v000008.delta')]
    assert_bit_equal(read(tmp_path, 4), versions[4])
    channel.release(8)
    assert names(tmp_path) == ['v000006', 'v000007.delta', 'v000008.delta']


def test_the_newest_two_versions_and_what_is_being_read_stay(tmp_path):
    channel, versions, _ = publish(tmp_path, 8, base_every=3)  # whole: 0, 3, 6
    with keep_while_read(tmp_path / 'v000000'):
        channel.release(100)
        assert names(tmp_path) == ['v000000', 'v000006', 'v000007.delta']
    for version in (6, 7):
        assert_bit_equal(read(tmp_path, version), versions[version])
    with pytest.raises(PublicationError, match=r'holds no version 4: it was removed, or never written'):
        read(tmp_path, 4)


def test_a_delta_without_its_base_says_so(tmp_path):
    publish(tmp_path, 3)
    (tmp_path / 'v000001.delta').unlink()
    with pytest.raises(PublicationError, match=r'holds no version 1, which version 2 needs: .* \(whole ones: \[0\]\)'):
        read(tmp_path, 2)


def test_a_resumed_run_removes_what_it_wrote_later(tmp_path):
    _, versions, _ = publish(tmp_path, 5)
    (tmp_path / '.v000009.delta.partial').write_bytes(b'half')
    resumed = open_channel(tmp_path)
    published = resumed.transfer(2, versions[2])
    assert published.size.record == 'whole'
    assert names(tmp_path) == ['v000000', 'v000001.delta', 'v000002']
    other = next_version(versions[2], seed=99)
    assert_bit_equal(resumed.receive(resumed.transfer(3, other)), other)


def test_a_reader_of_the_time_before_a_resume_takes_the_new_versions(tmp_path):
    before, versions, published = publish(tmp_path, 4)
    before.receive(published[3])
    resumed = open_channel(tmp_path)
    resumed.transfer(2, versions[2])
    other = next_version(versions[2], seed=99)
    assert_bit_equal(before.receive(resumed.transfer(3, other)), other)
    assert_bit_equal(before.receive(resumed.transfer(4, versions[3])), versions[3])


@pytest.mark.parametrize(
    ('base_every', 'left'),
    [(20, '.v000001.delta.partial'), pytest.param(1, '.v000001.partial', marks=pytest.mark.slow)],
)
def test_a_writer_that_is_killed_before_its_version_has_its_name(tmp_path, base_every, left):
    """SIGKILL between the last byte and the rename: version 1 is not there, and the next start removes what is left."""
    (tmp_path / 'v').mkdir()
    command = [sys.executable, '-c', KILLED, str(tmp_path / 'v'), str(base_every)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, check=False)
    assert done.returncode == -signal.SIGKILL
    one, two = make_versions(2, share=0.001)
    assert (tmp_path / 'v' / left).exists()
    assert_bit_equal(read(tmp_path / 'v', 0), one)
    with pytest.raises(PublicationError, match='holds no version 1'):
        read(tmp_path / 'v', 1)
    resumed = open_channel(tmp_path / 'v')
    published = resumed.transfer(0, one)
    assert names(tmp_path / 'v') == ['v000000']
    assert_bit_equal(resumed.receive(resumed.transfer(1, two)), two)
    assert published.size.record == 'whole'


# Files of deltas.


def one_delta(directory):
    carrier, versions = Carrier(), make_versions(2, share=0.001)
    channel = over(carrier)
    for version, params in enumerate(versions):
        channel.transfer(version, params)
    path = directory / 'v000001.delta'
    write_delta(path, carrier.records[1])
    return path, carrier.records[1]


def test_a_delta_is_read_as_it_was_written(tmp_path):
    path, record = one_delta(tmp_path)
    found = read_delta(path, 1)
    assert (found.header.version, found.header.base, found.header.leaves) == (
        1,
        record.header.base,
        record.header.leaves,
    )
    assert [bytes(part) for part in found.parts] == list(record.parts)
    assert read_base(path) == 0


def test_every_cut_and_every_flip_of_a_file_is_refused(tmp_path):
    path, _ = one_delta(tmp_path)
    content = path.read_bytes()
    for length in range(0, len(content), 41):
        path.write_bytes(content[:length])
        with pytest.raises(PublicationError, match=r'v000001\.delta'):
            read_delta(path, 1)
    for place in range(0, len(content), 17):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(PublicationError, match=r'v000001\.delta'):
            read_delta(path, 1)
    path.write_bytes(content + b'\0')
    with pytest.raises(PublicationError, match='is cut or changed'):
        read_delta(path, 1)


def test_a_delta_under_the_name_of_another_version_is_refused(tmp_path):
    path, _ = one_delta(tmp_path)
    path.rename(tmp_path / 'v000002.delta')
    with pytest.raises(PublicationError, match=r'holds a record of version 1, not version 2'):
        read_delta(tmp_path / 'v000002.delta', 2)


def test_versions_that_were_swapped_on_the_disk_are_refused(tmp_path):
    _, versions, _ = publish(tmp_path, 4)
    (tmp_path / 'v000003.delta').replace(tmp_path / 'three')
    (tmp_path / 'v000002.delta').replace(tmp_path / 'v000003.delta')
    (tmp_path / 'three').replace(tmp_path / 'v000002.delta')
    with pytest.raises(PublicationError, match=r'v00000\d\.delta|delta of version'):
        read(tmp_path, 3)
    assert_bit_equal(read(tmp_path, 1), versions[1])


def test_no_room_names_both_sizes(tmp_path, monkeypatch):
    channel, versions, _ = publish(tmp_path, 1)
    monkeypatch.setattr(files, 'free_bytes', lambda directory: 11)
    with pytest.raises(PublicationError, match=r'v000001.delta failed: .* has 11 bytes free, and the delta has \d{3,}'):
        channel.transfer(1, next_version(versions[0], 1))


def test_a_whole_version_with_another_manifest_is_refused(tmp_path):
    publish(tmp_path, 1)
    path = tmp_path / 'v000000' / 'manifest.json'
    told = json.loads(path.read_text())
    told['leaves'] = {name.replace('embedding', 'other'): leaf for name, leaf in told['leaves'].items()}
    path.write_text(json.dumps(told))
    with pytest.raises(PublicationError, match=r'does not hold version 0 as it was published'):
        read(tmp_path, 0)
