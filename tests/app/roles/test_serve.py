"""A server of ours under a run with deltas: each path that it may be told, and the digest that it answers with."""

import jax
import pytest

from areal_jax.app.roles.serve import VersionLoader
from areal_jax.models.decoder import Decoder
from areal_jax.publication.carriers.files_carrier import FilesSender
from areal_jax.publication.carriers.shm_carrier import ShmSender
from areal_jax.publication.carriers.stream_receiver import Reader, open_receiver
from areal_jax.publication.record_channel import RecordChannel
from areal_jax.publication.versions import PublicationError, name_version
from areal_jax.rollout.http.service import UpdateError, WeightsDirectory
from areal_jax.types import PublishedWeights
from tests.app.parts.test_engines import build_backend
from tests.publication.bits16 import held_of, make_versions, next_version, open_channel
from tests.publication.tiny import CONFIG, assert_bit_equal

DEVICE = jax.devices()[0]


@pytest.fixture(scope='module')
def backend():
    return build_backend([DEVICE])


def make_loader(backend, open_receiver=None):
    loader = VersionLoader(backend, Decoder(CONFIG), DEVICE, open_receiver)

    def load(published):
        """(prepared weights, digest) of what a route names by its path."""
        directory = WeightsDirectory(published.handle)
        return backend.prepare(loader(PublishedWeights(99, '', directory))).params, directory.digest

    return load


def prepared(backend, params):
    return backend.prepare(jax.device_put(params, DEVICE)).params


def test_a_server_follows_whole_versions_and_deltas(tmp_path, backend):
    load, channel, versions = make_loader(backend), open_channel(tmp_path, base_every=3), make_versions(6)
    in_use = None
    for version, params in enumerate(versions):
        published = channel.transfer(version, params)
        weights, digest = load(published)
        assert digest == published.manifest_hash
        assert_bit_equal(weights, prepared(backend, params))
        if in_use is not None:
            assert_bit_equal(in_use, prepared(backend, versions[version - 1]))
        in_use = weights
        channel.release(version)
    (held,) = FilesSender(tmp_path, CONFIG).held().values()
    assert held == held_of(versions[5], 5)


def test_a_server_that_joins_in_the_middle_of_a_chain(tmp_path, backend):
    channel, versions = open_channel(tmp_path), make_versions(4)
    published = [channel.transfer(version, params) for version, params in enumerate(versions)]
    weights, digest = make_loader(backend)(published[3])
    assert digest == published[3].manifest_hash
    assert_bit_equal(weights, prepared(backend, versions[3]))


def test_a_server_that_outlives_its_trainer_takes_the_new_versions(tmp_path, backend):
    """The trainer is resumed from version 1, and its versions 2 and 3 are others than those before."""
    load, before, versions = make_loader(backend), open_channel(tmp_path), make_versions(4)
    for version, params in enumerate(versions):
        load(before.transfer(version, params))
    resumed = open_channel(tmp_path)
    assert_bit_equal(load(resumed.transfer(1, versions[1]))[0], prepared(backend, versions[1]))
    for version in (2, 3):
        params = next_version(versions[1], seed=70 + version)
        assert_bit_equal(load(resumed.transfer(version, params))[0], prepared(backend, params))


def test_a_server_in_float32_refuses_deltas_of_16_bits(tmp_path):
    channel, (one, two) = open_channel(tmp_path), make_versions(2)
    channel.transfer(0, one)
    published = channel.transfer(1, two)
    loader = VersionLoader(build_backend([DEVICE], dtype='float32'), Decoder(CONFIG), DEVICE)
    with pytest.raises(UpdateError, match=r"is in bfloat16, and this server decodes in float32: start it with .*'bfl"):
        loader(PublishedWeights(99, '', WeightsDirectory(published.handle)))


def test_a_delta_that_is_not_there_is_one_sentence(tmp_path, backend):
    with pytest.raises(PublicationError, match=r'v000004.delta cannot be read \(No such file'):
        VersionLoader(backend, Decoder(CONFIG), DEVICE)(
            PublishedWeights(99, '', WeightsDirectory(str(tmp_path / 'v000004.delta')))
        )


@pytest.fixture
def start_learner(tmp_path):
    """A channel over shared memory for each start of a learner."""
    open_channels = []

    def start():
        sender = ShmSender(tmp_path / f'{len(open_channels)}.weights')
        channel = RecordChannel(sender, open_here, name='shm', name_version=name_version, delta=True, base_every=3)
        open_channels.append(channel)
        return channel

    yield start
    for channel in open_channels:
        channel.close()


def open_here(address):
    return open_receiver(address, Reader('engine 0'))


def test_a_server_follows_versions_at_addresses_and_a_new_start_of_the_learner(tmp_path, backend, start_learner):
    load, first, versions = make_loader(backend, open_here), start_learner(), make_versions(4)
    for version, params in enumerate(versions):
        published = first.transfer(version, params)
        assert published.size.record == ('whole' if version in (0, 3) else 'delta')
        weights, digest = load(published)
        assert digest == published.manifest_hash
        assert_bit_equal(weights, prepared(backend, params))
    second, other = start_learner(), next_version(versions[1], seed=5)
    weights, digest = load(second.transfer(2, other))
    assert_bit_equal(weights, prepared(backend, other))


def test_a_server_of_no_run_takes_no_version_from_an_address(backend, start_learner):
    published = start_learner().transfer(0, make_versions(1)[0])
    with pytest.raises(UpdateError, match=r'does not read: start it with the --workdir and the publication\.channel'):
        make_loader(backend)(published)
