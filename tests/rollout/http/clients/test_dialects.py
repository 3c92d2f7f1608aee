"""Recorded replies of real servers, read by the clients, and what the clients send."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.http.clients.connection import NoReplyError, Reply, StatusError, UpdateError
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import VllmDialect
from areal_jax.rollout.http.wire.exchange import Call, CallSampling, ReplyError
from tests.rollout.http.clients.fake_server import find_exchange, noted, read_exchanges


class Replayed:
    """A connection that answers with recorded replies, and keeps what was sent."""

    def __init__(self, *exchanges):
        self._exchanges, self.sent = list(exchanges), []

    async def request(self, method, path, body=None):
        self.sent.append((method, path, body))
        response = self._exchanges.pop(0)['response']
        content = response.get('json')
        return Reply(response['status'], response.get('text', str(content)), content)

    async def require(self, method, path, body=None):
        reply = await self.request(method, path, body)
        if reply.status != 200:
            raise StatusError(method, path, reply)
        return reply


def call(n, prompt=(5, 6, 7, 8, 9, 10)):
    sampling = CallSampling(max_new_tokens=n, ignore_eos=True)
    return Call((np.array(prompt, np.int32),), 'prompt', (sampling,), ('a',), logprobs=True)


def generate(dialect, exchange, n=300, vocab_size=512, **fields):
    return asyncio.run(dialect.generate(Replayed(exchange), call(n, **fields), vocab_size))


@pytest.mark.parametrize(
    ('name', 'note', 'tokens', 'reason', 'spans'),
    [
        ('generate', 'greedy', 6, 'length', [('default', 0, 6)]),
        ('generate', 'sampled', 12, 'length', [('default', 0, 12)]),
        ('generate', 'a stop token', 4, 'stop', [('default', 0, 4)]),
        ('interrupted', 'cut by /abort_requests with its id', 140, 'abort', [('default', 0, 140)]),
        ('interrupted', 'cut by pause(abort)', 134, 'abort', [('default', 0, 134)]),
        ('interrupted', 'sent while paused, served after the resume', 8, 'length', [('1', 0, 8)]),
        ('interrupted', 'lived through pause(keep) and an update', 300, 'length', [('1', 0, 145), ('0', 145, 300)]),
    ],
)
def test_answers_of_vllm_are_read(name, note, tokens, reason, spans):
    exchange = noted(f'vllm/{name}', note)
    answer = generate(VllmDialect(), exchange)
    (choice,) = exchange['response']['json']['choices']
    assert answer.tokens.tolist() == choice['token_ids']
    assert answer.logprobs.tolist() == [np.float32(entry['logprob']) for entry in choice['logprobs']['content']]
    assert (answer.n_tokens, answer.finish.reason) == (tokens, reason)
    assert [(span.version, span.start, span.end) for span in answer.spans] == spans


class ReplayedStream:
    """A connection on which a recorded stream comes line by line, and breaks off after `events`."""

    def __init__(self, lines, events=None):
        self._lines, self._events = lines, events

    async def stream(self, path, body, take):
        assert (path, body['stream']) == ('/inference/v1/generate', True)
        for line in self._lines[: self._events]:
            take(line)
        if self._events is not None:
            raise NoReplyError('the stream broke off')


def stream(lines, events=None):
    """(the pieces that were delivered, how the answer ended)."""
    delivered = []
    asked = dataclasses.replace(call(5), stream=True)
    try:
        connection = ReplayedStream(lines, events)
        reason = asyncio.run(VllmDialect().stream(connection, asked, 512, delivered.extend))
    except (NoReplyError, ReplyError) as error:
        reason = type(error)
    return [(piece.tokens.tolist(), piece.version) for piece in delivered], reason


def test_a_stream_of_vllm_is_read_with_the_versions_of_its_last_event():
    lines = noted('vllm/generate', 'stream')['response']['sse']
    assert stream(lines) == ([([184, 225, 463, 284, 284], 'default')], 'length')
    spans = '[{"version":"3","start":0,"end":2},{"version":"4","start":2,"end":5}]'
    moved = [line.replace('[{"version":"default","start":0,"end":5}]', spans) for line in lines]
    assert stream(moved) == ([([184, 225], '3'), ([463, 284, 284], '4')], 'length')


def test_what_came_of_a_stream_of_vllm_outlives_it():
    lines = noted('vllm/generate', 'stream')['response']['sse']
    assert stream(lines, 3) == ([([184], ''), ([225], ''), ([463], '')], NoReplyError)
    assert stream(lines[:3]) == ([([184], ''), ([225], ''), ([463], '')], NoReplyError)  # it ends, the answer does not
    assert stream([*lines[:2], 'data: {"choi']) == ([], ReplyError)  # a server that writes this is not believed


def test_an_answer_of_sglang_comes_at_once():
    exchange, delivered = find_exchange('sglang/generate_pause_abort', path='/generate'), []
    dialect = SglangDialect()
    reason = asyncio.run(dialect.stream(Replayed(exchange), call(300), 512, delivered.extend))
    assert (reason, dialect.streams) == ('abort', False)
    assert sum(len(piece.tokens) for piece in delivered) > 0


def test_a_token_outside_the_vocabulary_is_not_used():
    with pytest.raises(ReplyError, match='no id from 0 to 99'):
        generate(VllmDialect(), noted('vllm/generate', 'greedy'), vocab_size=100)


@pytest.mark.parametrize('note', ['no prompt', 'a negative id', 'no new tokens', 'an unknown model'])
def test_refusals_of_vllm_are_named(note):
    with pytest.raises(StatusError, match=r'/inference/v1/generate answered 40[04]: .{20}'):
        generate(VllmDialect(), noted('vllm/refusals', note))


@pytest.mark.parametrize('exchange', [*read_exchanges('vllm/death')[-1:], *read_exchanges('vllm/death_by_token')])
def test_a_dead_engine_of_vllm_is_seen_in_its_answers(exchange):
    with pytest.raises(StatusError, match='answered 500: EngineCore encountered an issue'):
        generate(VllmDialect(), exchange)


def test_what_a_dead_engine_of_vllm_says_of_itself_is_no_sign_of_life():
    assert [one['response']['status'] for one in read_exchanges('vllm/death')[1:3]] == [200, 200]


def test_an_update_of_vllm_sends_what_was_recorded():
    paths = ['/collective_rpc', '/update_weight_version', '/weight_info']
    recorded = [find_exchange('vllm/control', path=path) for path in paths]
    replayed = Replayed(*recorded)
    asyncio.run(VllmDialect().update(replayed, '/models/v1', '1'))
    requests = [one['request'] for one in recorded]
    assert replayed.sent == [(one['method'], one['path'], one.get('json')) for one in requests]


@pytest.mark.parametrize(
    ('name', 'note', 'tokens', 'reason', 'spans'),
    [
        ('generate', 'greedy', 6, 'length', [('default', 0, 6)]),
        ('generate', 'sampled', 12, 'length', [('default', 0, 12)]),
        ('generate', 'a stop token', 4, 'stop', [('default', 0, 4)]),
        ('interrupted', 'cut by /abort_request with its id', 188, 'abort', [('default', 0, 188)]),
        ('interrupted', 'cut by a pause, mode abort', 180, 'abort', [('default', 0, 180)]),
        ('interrupted', 'sent while paused, served after the continue', 8, 'length', [('1', 0, 8)]),
        (
            'interrupted', 'lived through a pause, mode retract, and an update', 300, 'length',
            [('1', 0, 150), ('0', 150, 300)],
        ),
        (
            'interrupted', 'lived through a pause, mode in_place, and an update', 300, 'length',
            [('0', 0, 132), ('1', 132, 300)],
        ),
        # what the server had told its front is kept, of more that it had generated
        ('interrupted', 'retracted by a pause, then aborted', 250, 'abort', [('1', 0, 250)]),
        ('interrupted', 'aborted before its first token', 0, 'abort', []),
    ],
)  # fmt: skip
def test_answers_of_sglang_are_read(name, note, tokens, reason, spans):
    exchange, dialect = noted(f'sglang/{name}', note), SglangDialect()
    answer = generate(dialect, exchange)
    entries = exchange['response']['json']['meta_info'].get('output_token_logprobs') or []
    assert answer.tokens.tolist() == [token for _, token, _ in entries]
    assert answer.logprobs.tolist() == [np.float32(logprob) for logprob, _, _ in entries]
    assert (answer.n_tokens, answer.finish.reason) == (tokens, reason)
    assert [(span.version, span.start, span.end) for span in answer.spans] == spans
    assert dialect.keeps_answers is (tokens > 0)  # a reply without tokens does not say


def test_answers_of_sglang_jax_are_read():
    """They have no spans, and more log-probs than tokens where these were not asked for from the last prompt token."""
    dialect = SglangDialect()
    partial = generate(dialect, find_exchange('sglang/generate_pause_abort', path='/generate'))
    assert partial.finish.reason == 'abort'
    assert partial.n_tokens > 0
    assert not dialect.keeps_answers
    with pytest.raises(ReplyError, match='entries for completion_tokens'):
        generate(dialect, find_exchange('sglang/generate_duplicated_logprobs', path='/generate'))


REFUSALS = [
    'no prompt', 'an empty prompt', 'longer than the context', 'a negative temperature', 'an unknown sampling field',
    'ids that are none', 'no JSON',
]  # fmt: skip


@pytest.mark.parametrize('note', REFUSALS)
def test_refusals_of_sglang_are_named(note):
    with pytest.raises(StatusError, match=r'/generate answered 400: [^{]{20}'):
        generate(SglangDialect(), noted('sglang/refusals', note))


@pytest.mark.parametrize('keeps_answers', [False, True])
def test_an_update_of_sglang_sends_what_was_recorded(keeps_answers):
    mode = 'retract' if keeps_answers else 'abort'
    recorded = [
        noted('sglang/control', f'pause, mode {mode}'), noted('sglang/control', 'load version 1'),
        noted('sglang/control', 'read it back'), noted('sglang/control', 'continue'),
    ]  # fmt: skip
    replayed, dialect = Replayed(*recorded), SglangDialect()

    async def update():
        await dialect.pause(replayed, keeps_answers)
        await dialect.update(replayed, '/models/v1', '1')
        await dialect.resume(replayed)

    asyncio.run(update())
    requests = [one['request'] for one in recorded]
    assert replayed.sent == [(one['method'], one['path'], one.get('json')) for one in requests]


def test_an_update_of_sglang_that_failed_in_part_is_no_success():
    """The weights are new, their name in /model_info is old: only the reply to the update shows it."""
    exchanges = read_exchanges('sglang/control')
    failed = next(
        i for i, one in enumerate(exchanges) if one['response'].get('json', {}).get('message', '').startswith('Weights')
    )
    assert exchanges[failed]['request']['json']['weight_version'] == '0'
    assert exchanges[failed + 1]['response']['json']['weight_version'] == '1'
    with pytest.raises(UpdateError, match='answered 400: Weights were updated, but the cache was not flushed'):
        asyncio.run(SglangDialect().update(Replayed(exchanges[failed]), '/models/v0', '0'))


@pytest.mark.parametrize(('replies', 'version'), [(slice(0, 1), 'default'), (slice(1, 3), '4'), (slice(1, None), '')])
def test_the_version_of_sglang_is_found_in_every_release(replies, version):
    newest = find_exchange('sglang/identity', path='/model_info')
    exchanges = [newest, *read_exchanges('sglang/version_discovery')]
    chosen = [exchanges[1], exchanges[3], exchanges[4]] if version == '' else exchanges[replies]
    assert asyncio.run(SglangDialect().ask_version(Replayed(*chosen))) == version


def test_sglang_looks_for_stop_ids_only_where_it_looks_for_eos():
    exchange = noted('sglang/generate', 'greedy')
    found = {}
    for stop in ((), (2,)):
        replayed = Replayed(exchange)
        sampling = CallSampling(max_new_tokens=9, ignore_eos=True, stop_tokens=stop)
        asked = Call((np.array([5, 6, 7], np.int32),), 'prompt', (sampling,), ('a',), logprobs=True)
        asyncio.run(SglangDialect().generate(replayed, asked, 512))
        found[stop] = replayed.sent[0][2]['sampling_params']['ignore_eos']
    assert found == {(): True, (2,): False}
