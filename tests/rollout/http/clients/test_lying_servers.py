"""Replies in which one field is not what it should be: the clients raise their own errors, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import math

import numpy as np
import pytest
from aiohttp import web

from areal_jax.rollout.http.clients.connection import Connection, NoReplyError, Reply, StatusError, UpdateError
from areal_jax.rollout.http.clients.server import read_version
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import OwnDialect, VllmDialect
from areal_jax.rollout.http.wire import sglang, vllm
from areal_jax.rollout.http.wire.exchange import Answer, Finish, Piece, ReplyError, ReplyInfo
from areal_jax.types import LARGEST_LOGPROB
from tests.changed_json import broken_texts, changed
from tests.rollout.http.clients.fake_server import VOCAB_SIZE, find_exchange, noted
from tests.rollout.http.clients.test_dialects import call
from tests.rollout.http.expert_rig import FORM, FORMS

NAMED = (ReplyError, NoReplyError, StatusError, UpdateError)
QUICK = 60  # changed replies of each kind
LENGTHS = [pytest.param(QUICK, id='some'), pytest.param(None, id='all', marks=pytest.mark.slow)]


class Lying:
    """A connection on which every request has the same reply."""

    def __init__(self, content, lines=(), status=200):
        text = json.dumps(content)
        self._reply, self._lines = Reply(status, text, content), lines

    async def request(self, method, path, body=None):
        return self._reply

    async def require(self, method, path, body=None):
        if self._reply.status != 200:
            raise StatusError(method, path, self._reply)
        return self._reply

    async def stream(self, path, body, take):
        for line in self._lines:
            take(line)


def outlive(runner, act):
    """Whether the reply was refused, by an error of the clients' own that is short and can be written anywhere."""
    message = ''
    try:
        runner.run(act())
    except NAMED as error:
        message = str(error)
    assert len(message.encode()) < 2000, 'the message repeats the reply'
    return bool(message)


@pytest.fixture(scope='module')
def runner():
    with asyncio.Runner() as runner:
        yield runner


def require_sound(pieces, n_tokens=math.inf):
    for piece in pieces:
        assert piece.tokens.dtype == np.int32
        assert piece.logprobs.dtype == np.float32
        assert np.all((piece.tokens >= 0) & (piece.tokens < VOCAB_SIZE))
        assert np.all(np.isfinite(piece.logprobs) & (piece.logprobs <= LARGEST_LOGPROB))
        assert isinstance(read_version(piece.version), int)
        assert all(len(column) == len(piece.tokens) for column in piece.columns.values())


async def generate(dialect, asked, content):
    answer = await dialect.generate(Lying(content), asked, VOCAB_SIZE)
    require_sound(answer.pieces)
    assert answer.finish is None or answer.finish.reason in ('stop', 'length', 'abort')


ANSWERS = [
    (SglangDialect, lambda: noted('sglang/generate', 'a stop token')),
    (SglangDialect, lambda: noted('sglang/interrupted', 'aborted before its first token')),
    (SglangDialect, lambda: noted('sglang/interrupted', 'lived through a pause, mode retract, and an update')),
    (VllmDialect, lambda: noted('vllm/generate', 'a stop token')),
    (VllmDialect, lambda: noted('vllm/interrupted', 'lived through pause(keep) and an update')),
]


@pytest.mark.parametrize('most', LENGTHS)
@pytest.mark.parametrize(('make', 'find'), ANSWERS)
def test_recorded_answers_with_a_changed_field_are_read_or_refused(runner, make, find, most):
    content = find()['response']['json']
    refused = 0
    for wrong in (*changed(content, most), *([one] for one in changed(content, most)), [], [content, content]):
        refused += outlive(runner, lambda wrong=wrong: generate(make(), call(300), wrong))
    assert refused > 10


def with_columns(dialect):
    """A reply of ours with every kind of column: of tokens, and of the model."""
    prompt = np.arange(1, 4, dtype=np.int32)
    names = ('sampling_logprobs', *FORMS)
    asked = dataclasses.replace(call(3, prompt.tolist()), request_ids=('r',), columns=names, forms=FORMS)
    rows = np.tile(np.arange(FORM.row[1], dtype=np.uint8), (2 + 3, FORM.row[0], 1))
    context = {name: np.concatenate([FORM.column.blank(1), rows[:2]]) for name in FORMS}
    logprobs = np.full(3, -0.5, np.float32)
    columns = {'sampling_logprobs': logprobs, **dict.fromkeys(FORMS, rows[2:])}
    pieces = [Piece(np.array([4, 5, 6], np.int32), logprobs, '3', columns, context=context)]
    answer = Answer('r', prompt, 0, pieces, Finish('length'), '3')
    return asked, json.loads(json.dumps(dialect.render(asked, [answer], ReplyInfo('', 0))))


@pytest.mark.parametrize('most', LENGTHS)
@pytest.mark.parametrize(('make', 'dialect'), [(SglangDialect, sglang), (VllmDialect, vllm)])
def test_columns_in_replies_are_read_or_refused(runner, make, dialect, most):
    asked, content = with_columns(dialect)
    runner.run(generate(make(), asked, content))
    refused = [outlive(runner, lambda one=one: generate(make(), asked, one)) for one in changed(content, most)]
    assert sum(refused) > 10


@pytest.mark.parametrize(
    'header',
    [
        f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({10**30},), }}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -5, 2), }",
        "{'descr': '|u1', 'fortran_order': True, 'shape': (9223372036854775807, 9223372036854775807), }",
        "{'descr': '|V99999999999', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<i8', (99999, 99999, 99999))], 'fortran_order': False, 'shape': (1,), }",
        '(' * 5000,
        '-' * 9000 + '1',
    ],
)
def test_the_header_of_a_file_that_lies_is_refused(runner, header):
    asked, content = with_columns(vllm)
    text = header.encode().ljust(118) + b'\n'
    file = b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text + bytes(90)
    content['choices'][0][next(iter(FORMS))] = base64.b64encode(file).decode()
    assert outlive(runner, lambda: generate(VllmDialect(), asked, content))


@pytest.mark.parametrize('most', LENGTHS)
@pytest.mark.parametrize('make', [VllmDialect, OwnDialect])
def test_events_of_a_stream_with_a_changed_field_are_read_or_refused(runner, make, most):
    lines = noted('vllm/generate', 'stream')['response']['sse']
    asked, refused = dataclasses.replace(call(5), stream=True), 0
    events = [index for index, line in enumerate(lines) if line.startswith('data: {')]
    for index in (events[0], events[-1]):
        content = json.loads(lines[index].removeprefix('data: '))
        texts = [json.dumps(one) for one in changed(content, most)] + list(broken_texts(json.dumps(content)))
        for text in texts:
            changed_lines = [*lines[:index], f'data: {text}', *lines[index + 1 :]]
            delivered = []
            stream = lambda: make().stream(Lying(None, changed_lines), asked, VOCAB_SIZE, delivered.extend)
            refused += outlive(runner, stream)
            require_sound(delivered)
    assert refused > 20


CONTROL = [
    (SglangDialect, lambda: find_exchange('sglang/control', path='/model_info'), 'ask_version', ()),
    (SglangDialect, lambda: find_exchange('sglang/control', path='/update_weights_from_disk'), 'update', ('d', '1')),
    (VllmDialect, lambda: find_exchange('vllm/control', path='/weight_info'), 'ask_version', ()),
    (VllmDialect, lambda: find_exchange('vllm/control', path='/collective_rpc'), 'update', ('d', '1')),
    (OwnDialect, lambda: {'response': {'json': {'weight_version': '3', 'manifest_hash': 'a'}}}, 'ask', ()),
    (OwnDialect, lambda: {'response': {'json': {'pause_seconds': 0.5}}}, 'swap', ('3',)),
]


@pytest.mark.parametrize('status', [200, 400])
@pytest.mark.parametrize(('make', 'find', 'action', 'arguments'), CONTROL)
def test_replies_of_control_with_a_changed_field_are_read_or_refused(runner, make, find, action, arguments, status):
    content = find()['response']['json']

    async def act(one):
        found = await getattr(make(), action)(Lying(one, status=status), *arguments)
        if action == 'swap':
            assert 0 <= found < 1e30
        elif action != 'update':
            for name in [found] if isinstance(found, str) else [found.version, found.digest, found.client]:
                assert isinstance(name, str)
                name.encode()
                read_version(name)

    for one in (*changed(content), *changed({'error': {'message': 'a'}}), *changed({'detail': 'b'})):
        outlive(runner, lambda one=one: act(one))


def test_bodies_that_are_no_json_have_no_content(runner):
    """Over a real connection: what is nested without end, half of it, a number of thousands of digits."""
    bodies = [*broken_texts('{"weight_version": "1"}')]

    async def serve():
        async def answer(request):
            return web.Response(text=bodies[int(request.path[1:])])

        app = web.Application()
        app.router.add_get('/{number}', answer)
        started = web.AppRunner(app)
        await started.setup()
        site = web.TCPSite(started, '127.0.0.1', 0)
        await site.start()
        connection = Connection(f'http://127.0.0.1:{started.addresses[0][1]}')
        try:
            replies = [await connection.request('GET', f'/{number}') for number in range(len(bodies))]
        finally:
            await connection.close()
            await started.cleanup()
        return replies

    for reply in runner.run(serve()):
        assert reply.fields().values == {}
        assert len(reply.message()) <= 300


@pytest.mark.parametrize('name', ['7' * 5000, '\ud800', '-1', '٣', ' 3', ''])
def test_a_name_that_this_project_did_not_make_is_no_version(name):
    assert read_version(name) == -1
