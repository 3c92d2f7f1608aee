"""The receiver beside a server: its requests and refusals, and its process, which is started again when it dies."""

import asyncio
import contextlib
import http.client
import os
import signal
import time

import pytest

from areal_jax.app.process.setup import find_key
from areal_jax.app.roles.receiver import Serving
from areal_jax.app.roles.server_program import ReceiverProcess, find_directory, parse_flags
from areal_jax.publication.files_channel import find_version, load_version
from areal_jax.publication.weight_buffers import HfReceiver, copy_template
from areal_jax.rollout.http.clients.connection import Connection, NoReplyError
from tests.publication.bits16 import Carrier, make_versions, open_channel, over
from tests.publication.tiny import CONFIG, assert_bit_equal

KEY = 'clé'


def ask(url, *requests, key=KEY):
    """(status, JSON or sentence) of each (method, path, body)."""

    async def run():
        connection = Connection(url, key)
        try:
            return [await connection.request(*one) for one in requests]
        finally:
            await connection.close()

    return [
        (reply.status, reply.fields().values if reply.status == 200 else reply.message())
        for reply in asyncio.run(run())
    ]


def post_length(url, length):
    """The status of a request for a version with that Content-Length."""
    connection = http.client.HTTPConnection(url.removeprefix('http://'), timeout=20)
    with contextlib.closing(connection):
        connection.putrequest('POST', '/versions')
        connection.putheader('Content-Length', length)
        connection.putheader('Authorization', f'Bearer {KEY}'.encode())
        connection.endheaders()
        return connection.getresponse().status


def body(published):
    return {'version': published.version, 'manifest_hash': published.manifest_hash}


def test_a_version_is_asked_for_by_its_manifest(tmp_path):
    versions, carrier = make_versions(2), Carrier()
    open_channel(tmp_path / 'learner').transfer(0, versions[0])
    template = copy_template(tmp_path / 'learner' / 'v000000', tmp_path / 'template')
    channel = over(carrier)
    channel.transfer(0, versions[0])
    published = channel.transfer(1, versions[1])
    receiver = HfReceiver(carrier, template, tmp_path / 'made')
    with Serving(receiver, '127.0.0.1', 0, KEY) as serving:
        replies = ask(
            serving.url,
            ('GET', '/health'),
            ('POST', '/versions', body(published)),
            ('POST', '/versions', {'version': 1, 'manifest_hash': '0' * 64}),
            ('POST', '/versions', {'version': '1', 'manifest_hash': ''}),
            ('POST', '/versions', {'version': 1}),
            ('POST', '/versions'),
            ('POST', '/other', body(published)),
            ('GET', '/other'),
        )
        strangers = [
            ask(serving.url, ('POST', '/versions', body(published)), key=key)[0] for key in ('', 'cle', 'clé ')
        ]
        assert ask(serving.url, ('GET', '/health'), key='') == [(200, {})]
        length = post_length(serving.url, '9' * 5000)
    assert [status for status, _ in strangers] == [401] * 3
    assert 'Authorization must be "Bearer KEY"' in strangers[0][1]
    assert length == 400
    made = tmp_path / 'made' / 'v000001'
    assert replies[:2] == [(200, {}), (200, {'directory': str(made)})]
    assert [status for status, _ in replies[2:]] == [409, 400, 400, 400, 400, 404]
    assert 'version 1 with manifest 000000000000 was asked for' in replies[2][1]
    assert 'the request is not {"version": 4, "manifest_hash": "..."} at /versions' in replies[3][1]
    assert_bit_equal(load_version(find_version(made, 1), CONFIG, verify=True), versions[1])


def await_reply(url, *request, key):
    end_s = time.monotonic() + 60
    while True:
        try:
            return ask(url, request, key=key)[0]
        except NoReplyError:
            assert time.monotonic() < end_s
            time.sleep(0.1)


@pytest.mark.slow
def test_a_receiver_that_is_killed_reads_again_what_it_held(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'disk'))
    monkeypatch.setattr('tempfile.tempdir', None)
    (tmp_path / 'disk').mkdir()
    channel, versions = open_channel(tmp_path / 'publication'), make_versions(3)
    published = [channel.transfer(version, params) for version, params in enumerate(versions)]
    flags = ['', f'--workdir={tmp_path}', '--name=0', f'--publication={tmp_path / "publication"}', '--receiver']
    with ReceiverProcess(parse_flags(flags)) as process:
        key = find_key(tmp_path)
        status, first = await_reply(process.url, 'POST', '/versions', body(published[1]), key=key)
        assert (status, first) == (200, {'directory': str(find_directory(tmp_path, '0') / 'v000001')})
        process.ensure()  # it runs
        os.kill(process.pid, signal.SIGKILL)
        end_s = time.monotonic() + 60
        while process.is_alive:
            assert time.monotonic() < end_s
        process.ensure()
        status, second = await_reply(process.url, 'POST', '/versions', body(published[2]), key=key)
        assert status == 200
        assert_bit_equal(load_version(find_version(second['directory'], 2), CONFIG, verify=True), versions[2])
    assert not process.is_alive
    assert not find_directory(tmp_path, '0').exists()
