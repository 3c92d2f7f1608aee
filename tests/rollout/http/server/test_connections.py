"""Connections that say nothing, little, or never read keep nobody out: of a toy server, and of a real one."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from areal_jax.rollout.http.server import connections
from areal_jax.rollout.http.server import limits as descriptors
from areal_jax.rollout.http.server.limits import NAME, Limits, OncePerMinute, bounded_log
from tests.rollout.http.server.rig import ToyServer, body, until

ROOT = pathlib.Path(__file__).parents[4]
FEW = 8
LIMITS = Limits(connections=FEW, header_s=0.4, requests=FEW)
POST = b'POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n'


def connect(server, content=b''):
    host, port = server.url.removeprefix('http://').split(':')
    found = socket.create_connection((host, int(port)), timeout=10)
    found.sendall(content)
    return found


def is_closed(connected):
    """Whether the server has closed it within its timeout."""
    try:
        return connected.recv(1000) == b''
    except ConnectionResetError:
        return True


def test_silent_connections_and_halves_of_heads_are_closed_in_time():
    with ToyServer(limits=LIMITS) as server:
        silent = [connect(server), connect(server, b'POST /generate HTTP/1.1\r\nContent-Le')]
        used = connect(server, b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
        assert used.recv(1000).startswith(b'HTTP/1.1 200')
        began = time.monotonic()
        assert all(is_closed(one) for one in silent)
        assert time.monotonic() - began < 5
        used.sendall(b'GET /health HTTP/1.1\r\n')  # the idle connection of a client is kept, and half of a head is not
        assert is_closed(used)


def test_a_byte_now_and_then_does_not_keep_a_connection():
    async def script(client):
        host, port = client.url.removeprefix('http://').split(':')
        reader, writer = await asyncio.open_connection(host, int(port))
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in b'POST /generate HTTP/1.1\r\n' * 10:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
                if reader.at_eof():
                    break
        writer.close()
        return time.monotonic() - began

    with ToyServer(limits=LIMITS) as server:
        assert 0.3 < server.run(script) < 4


@pytest.mark.parametrize('opening', [b'', b'%sContent-Length: 99\r\n\r\n{' % POST, b'GET /health HT'])
def test_the_longest_silent_connection_makes_room(opening):
    with ToyServer(limits=dataclasses.replace(LIMITS, header_s=60.0)) as server:
        silent = [connect(server, opening) for _ in range(4 * FEW)]
        began = time.monotonic()
        health, (status, _) = (
            server.run(lambda client: client.get('/health')),
            server.run(lambda c: c.post('/generate', body(2))),
        )
        assert time.monotonic() - began < 5
        assert (health[0], status) == (200, 200)
        assert all(is_closed(one) for one in silent[:FEW])
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
        for one in silent:
            one.close()


def test_a_connection_whose_answer_is_being_made_is_never_closed_for_room():
    async def script(client):
        answers = [asyncio.ensure_future(client.post('/generate', body(150))) for _ in range(4)]
        await until(lambda: _open(server, 4))
        silent = [connect(server) for _ in range(6 * FEW)]
        found = [(await answer)[0] for answer in answers]
        for one in silent:
            one.close()
        return found

    with ToyServer(limits=dataclasses.replace(LIMITS, header_s=60.0)) as server:
        assert server.run(script) == [200] * 4


async def _open(server, count):
    return len(server.engine.open_requests()) == count


def test_a_client_that_never_reads_its_answer_is_let_go(monkeypatch):
    monkeypatch.setattr(connections, 'SWEEP_S', 0.05)
    content = json.dumps(body(390, sampling={'n': 64})).encode()
    head = b'%sContent-Length: %d\r\n\r\n' % (POST, len(content))
    with ToyServer(limits=dataclasses.replace(LIMITS, write_s=0.3, requests=200, connections=300), slots=64) as server:
        server.backend.step_s = 0.0
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix('http://').split(':')
        reader.connect((host, int(port)))
        reader.sendall((head + content) * 8)  # more than the buffers of the system take

        async def script(client):
            await until(lambda: _connections(client, 1), 120)
            return (await client.get('/health'))[0]

        assert server.run(script) == 200
        reader.close()


async def _connections(client, count):
    return f'areal_jax_connections_open {count}\n' in (await client.get('/metrics'))[1]


def test_one_request_takes_a_share_of_the_queue_and_many_of_one_host_do_not_share():
    async def script(client):
        too_many = await client.post('/generate', body(300, sampling={'n': 33}))
        first = asyncio.ensure_future(client.post('/generate', body(300, sampling={'n': 32})))
        await until(lambda: _open(server, 32))
        half_of_the_rest, _ = await client.post('/generate', body(1, sampling={'n': 17}))
        singles = [asyncio.ensure_future(client.post('/generate', body(300))) for _ in range(32)]
        await until(lambda: _open(server, 64))
        full = await client.post('/generate', body(1))
        await client.post('/abort_request', {'abort_all': True})
        return too_many, half_of_the_rest, (await first)[0], {(await one)[0] for one in singles}, full[0]

    with ToyServer(limits=Limits(requests=64)) as server:
        too_many, half_of_the_rest, first, singles, full = server.run(script)
    assert too_many[0] == 400
    assert '33 answers in one request, and this server takes 32 at most, server.max_share=0.5' in str(too_many[1])
    assert (half_of_the_rest, first, singles, full) == (503, 200, {200}, 503)


def test_a_kind_of_complaint_is_a_line_a_minute(caplog):
    now = [0.0]
    with bounded_log() as log:
        for bound in list(log.filters):
            log.removeFilter(bound)
        log.addFilter(bound := OncePerMinute(lambda: now[0]))
        with caplog.at_level(logging.WARNING, NAME):
            for second in range(100):
                now[0] = second
                log.warning('no room for %d', second)
                log.error('another kind')
        log.removeFilter(bound)
    found = [record.getMessage() for record in caplog.records]
    assert found == ['no room for 0', 'another kind', 'no room for 60 (and 59 times since the last such line)',
                     'another kind (and 59 times since the last such line)']  # fmt: skip


def test_connections_are_fewer_than_descriptors(monkeypatch):
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: (1024, 2000))
    assert 700 < descriptors.count_connections(4096) < 1024 - 100
    assert descriptors.count_connections(5) == 5
    asked = []
    monkeypatch.setattr(resource, 'setrlimit', lambda kind, limits: asked.append(limits))
    descriptors.raise_limit()
    assert asked == [(2000, 2000)]
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: (1024, resource.RLIM_INFINITY))
    descriptors.raise_limit()
    assert asked[1:] == [(65536, resource.RLIM_INFINITY)]


# A real server, in a process whose descriptors are few.

HEADER_S = 4.0


@contextlib.contextmanager
def serving(log, soft, hard):
    """The address of a server of random weights whose process may open so many files."""

    def few_descriptors():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    command = [
        sys.executable, '-m', 'areal_jax.main_serve', '--config=configs/tiny_cpu.py', '--port=0',
        f'--config.server.header_timeout_s={HEADER_S}',
    ]  # fmt: skip
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    with log.open('w') as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=few_descriptors, env=environment
        )
    try:
        end = time.monotonic() + 240
        while (found := re.search(r'serving \S+ on (http://\S+)', log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def ask(url, path, content=None):
    """(status, seconds) of a request on a connection of its own."""
    began = time.monotonic()
    data = None if content is None else json.dumps(content).encode()
    asked = urllib.request.Request(f'{url}{path}', data, {'Content-Type': 'application/json'})
    with urllib.request.urlopen(asked, timeout=20) as reply:
        reply.read()
        return reply.status, round(time.monotonic() - began, 3)


async def hold_silent_and_dribbling(url, silent, dribbling, then):
    """Opens connections that say nothing and some that say a byte now and then, and opens again what is closed."""
    host, port = url.removeprefix('http://').split(':')
    writers = []
    for _number in range(silent + dribbling):
        _, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)

    async def dribble(writer):
        with contextlib.suppress(OSError):
            for byte in b'POST /generate HTTP/1.1\r\n' + b'X: ' + b'y' * 10_000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.25)

    tasks = [asyncio.ensure_future(dribble(writer)) for writer in writers[silent:]]
    try:
        return await then()
    finally:
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.close()


@pytest.mark.slow
@pytest.mark.parametrize('hard', [4096, 1024])
def test_silent_and_dribbling_connections_lock_nobody_out_of_a_real_server(tmp_path, hard):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))  # of the attacker
    request = {'input_ids': [1, 2, 3], 'sampling_params': {'max_new_tokens': 2}}
    times = {}

    async def measure(when):
        for path, content in (('/health', None), ('/generate', request)):
            found = [await asyncio.to_thread(ask, url, path, content) for _ in range(5)]
            assert {status for status, _ in found} == {200}
            times[f'{when} {path}'] = max(seconds for _, seconds in found)

    async def attack():
        await measure('during')
        await asyncio.sleep(HEADER_S + 2)
        await measure('after the header timeout')

    log = tmp_path / 'log'
    with serving(log, 1024, hard) as url:
        asyncio.run(measure('before'))
        asyncio.run(hold_silent_and_dribbling(url, 1100, 200, attack))
        asyncio.run(measure('at the end'))
        lines = len(log.read_text().splitlines())
    print(f'soft limit 1024, hard limit {hard}: longest of 5, in seconds: {times}; {lines} lines of log')
    assert max(times.values()) < 1.0
    assert lines < 100
