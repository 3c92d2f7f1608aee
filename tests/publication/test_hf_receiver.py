"""Directories made of records: what the learner would have written, bit for bit, whatever happens on the way."""

import dataclasses

import pytest

from areal_jax import files
from areal_jax.formats.hf_export import HfCompanions
from areal_jax.publication.carriers.files_carrier import FilesReceiver, FilesSender
from areal_jax.publication.files_channel import FilesChannel, find_version, load_version
from areal_jax.publication.record import Record
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.publication.versions import PublicationError
from areal_jax.publication.weight_buffers import HfReceiver, copy_template
from tests.publication.bits16 import Carrier, held_of, make_versions, over
from tests.publication.tiny import CONFIG, assert_bit_equal


@pytest.fixture
def template(tmp_path):
    """That of a run whose version 0 has a tokenizer."""
    companions = HfCompanions(texts={'tokenizer.json': '{"a": 1}'})
    FilesChannel(tmp_path / 'learner', CONFIG, verify=False, companions=companions).transfer(0, make_versions(1)[0])
    return copy_template(tmp_path / 'learner' / 'v000000', tmp_path / 'template')


def names(directory):
    return sorted(path.name for path in directory.glob('v*'))


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def bring(receiver, published):
    return receiver.bring(published.version, published.manifest_hash)


def test_directories_are_those_that_the_learner_writes(tmp_path, template):
    """Of whole records and of deltas, over the file system: every file is equal, the tokenizer and manifest too."""
    versions, companions = make_versions(4, share=0.001), HfCompanions(texts={'tokenizer.json': '{"a": 1}'})
    sender = FilesSender(tmp_path / 'sent', CONFIG, companions=companions)
    channel = RecordChannel(sender, lambda address: None, name='files', delta=True, base_every=3)
    receiver = HfReceiver(FilesReceiver(tmp_path / 'sent', CONFIG, 'server'), template, tmp_path / 'made')
    for version, params in enumerate(versions):
        published = channel.transfer(version, params)
        assert published.handle.endswith('.delta') == (version in (1, 2))
        plain = FilesChannel(tmp_path / 'plain', CONFIG, verify=False, companions=companions).transfer(version, params)
        made = bring(receiver, published)
        assert contents(made) == contents(tmp_path / 'plain' / f'v{version:06d}')
        assert_bit_equal(load_version(find_version(made, version), CONFIG, verify=True), params)
        assert plain.manifest_hash == published.manifest_hash
    assert names(tmp_path / 'made') == ['v000002', 'v000003']  # the one in use, and the next
    assert sender.held() == {'server': held_of(versions[3], 3)}


def test_only_what_is_missing_is_fetched(tmp_path, template):
    carrier = Carrier()
    channel, receiver = over(carrier), HfReceiver(carrier, template, tmp_path / 'made')
    published = [channel.transfer(version, params) for version, params in enumerate(make_versions(5))]
    for version in (1, 2, 2, 4):
        bring(receiver, published[version])
    assert carrier.fetched == [('whole', 0), *(('delta', version) for version in (1, 2, 3, 4))]
    bring(receiver, published[1])  # of a run that was resumed: what came later goes
    assert carrier.fetched[5:] == [('whole', 0), ('delta', 1)]
    assert names(tmp_path / 'made') == ['v000001']


def flip(record):
    """The record with one bit of its last part changed."""
    parts = [bytearray(part) for part in record.parts]
    last = next(part for part in reversed(parts) if part)
    last[-1] ^= 1
    return Record(record.header, parts)


def test_a_damaged_delta_is_followed_by_the_whole_record_once(tmp_path, template):
    carrier = Carrier()
    channel, receiver = over(carrier, base_every=2), HfReceiver(carrier, template, tmp_path / 'made')
    versions = make_versions(4)
    bring(receiver, channel.transfer(0, versions[0]))
    published = channel.transfer(1, versions[1])
    carrier.damage = lambda record: flip(record) if record.header.base else record
    with pytest.raises(PublicationError):
        bring(receiver, published)
    assert carrier.fetched[1:] == [('delta', 1), ('whole', 0), ('delta', 1)]
    assert receiver.held is None
    assert names(tmp_path / 'made') == ['v000000']  # the server can still load it
    carrier.damage = lambda record: record
    made = bring(receiver, published)
    assert_bit_equal(load_version(find_version(made, 1), CONFIG, verify=True), versions[1])


def test_a_version_with_another_manifest_is_refused(tmp_path, template):
    carrier = Carrier()
    channel, receiver = over(carrier), HfReceiver(carrier, template, tmp_path / 'made')
    published = channel.transfer(0, make_versions(1)[0])
    with pytest.raises(PublicationError, match=r'version 0 with manifest 0{12} was asked for, and its records lead to'):
        receiver.bring(0, '0' * 64)
    assert bring(receiver, published).name == 'v000000'


def test_a_full_disk_leaves_the_version_before(tmp_path, template, monkeypatch):
    carrier = Carrier()
    channel, receiver = over(carrier), HfReceiver(carrier, template, tmp_path / 'made')
    versions = make_versions(3)
    published = [channel.transfer(version, params) for version, params in enumerate(versions)]
    bring(receiver, published[0])
    with monkeypatch.context() as patch:
        patch.setattr(files, 'free_bytes', lambda directory: 100)
        with pytest.raises(PublicationError, match=r'has 100 bytes free, .*name another --directory') as refused:
            bring(receiver, published[1])
    assert names(tmp_path / 'made') == ['v000000']
    made = bring(receiver, published[2])
    assert refused.tb  # the error was alive, and with it what was to be written
    assert_bit_equal(load_version(find_version(made, 2), CONFIG, verify=True), versions[2])


@pytest.mark.parametrize('separate_head', [False, True])
def test_a_tied_head_is_written_as_in_the_template(tmp_path, separate_head):
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = make_versions(1, config=tied)[0]
    FilesChannel(tmp_path / 'learner', tied, verify=False, separate_head=separate_head).transfer(0, params)
    template = copy_template(tmp_path / 'learner' / 'v000000', tmp_path / 'template')
    assert (template.config.tie_embeddings, template.separate_head) == (True, separate_head)
    carrier = Carrier()
    made = bring(HfReceiver(carrier, template, tmp_path / 'made'), over(carrier).transfer(0, params))
    assert contents(made) == contents(tmp_path / 'learner' / 'v000000')


def test_a_directory_that_no_run_published_is_no_template(tmp_path):
    with pytest.raises(PublicationError, match='does not hold version'):
        copy_template(tmp_path, tmp_path / 'template')
