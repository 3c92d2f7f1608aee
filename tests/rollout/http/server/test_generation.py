"""The routes that generate, over HTTP: three dialects, one engine."""

import asyncio

import numpy as np
import pytest

from areal_jax.rollout.http.server.bridge import Bridge, Exchange, Texts
from areal_jax.rollout.http.server.limits import Limits
from areal_jax.rollout.http.service import Delivery
from areal_jax.rollout.http.wire import sglang
from areal_jax.rollout.http.wire.exchange import Piece
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.rollout.http.server.rig import PROMPT, ToyServer, body, until
from tests.toys import token


@pytest.fixture(scope='module')
def server():
    with ToyServer() as server:
        yield server


def expected(new, w=0, sample=0):
    return [token(w, 0, sample, position) for position in range(len(PROMPT), len(PROMPT) + new)]


def test_the_three_dialects_agree_on_ids_log_probs_and_spans(server):
    async def script(client):
        _, sglang = await client.post('/generate', body())
        sampling = {'max_tokens': 6, 'ignore_eos': True, 'seed': 0, 'logprobs': 1}
        _, vllm = await client.post('/inference/v1/generate', {'token_ids': PROMPT, 'sampling_params': sampling})
        asked = {'max_tokens': 6, 'ignore_eos': True, 'seed': 0, 'return_token_ids': True}
        _, completion = await client.post('/v1/completions', {'prompt': PROMPT, 'logprobs': 0, **asked})
        _, chat = await client.post(
            '/v1/chat/completions', {'messages': [{'role': 'user', 'content': 'abc'}], 'logprobs': True, **asked}
        )
        return sglang, vllm['choices'][0], completion, chat

    sglang, vllm, completion, chat = server.run(script)
    meta = sglang['meta_info']
    assert sglang['output_ids'] == expected(6) == vllm['token_ids']
    assert completion['choices'][0]['token_ids'] == expected(6) == chat['choices'][0]['token_ids']
    logprobs = [entry[0] for entry in meta['output_token_logprobs']]
    assert logprobs == [entry['logprob'] for entry in vllm['logprobs']['content']]
    assert logprobs == completion['choices'][0]['logprobs']['token_logprobs']
    assert logprobs == [entry['logprob'] for entry in chat['choices'][0]['logprobs']['content']]
    spans = [{'version': '0', 'start': 0, 'end': 6}]
    assert meta['weight_versions'] == spans == vllm['weight_versions'] == chat['metadata']['weight_versions']
    assert meta['finish_reason'] == {'type': 'length', 'length': 6}
    assert chat['choices'][0]['message']['content'] == ''.join('abcdefghi'[t - 1] for t in expected(6))


def test_samples_and_batches_come_in_order(server):
    async def script(client):
        samples = await client.post('/generate', body(sampling={'n': 3}))
        batch = await client.post(
            '/generate', body(3) | {'input_ids': [PROMPT, PROMPT + PROMPT], 'logprob_start_len': -1}
        )
        return samples[1], batch[1]

    samples, batch = server.run(script)
    assert [one['output_ids'] for one in samples] == [expected(6, sample=sample) for sample in range(3)]
    assert [one['meta_info']['prompt_tokens'] for one in batch] == [3, 6]


def test_requests_without_a_seed_get_noise_of_their_own(server):
    async def script(client):
        return [await client.post('/generate', body(seed=None)) for _ in range(2)]

    (_, first), (_, second) = server.run(script)
    assert first['output_ids'] != second['output_ids']


@pytest.mark.parametrize('path', ['/generate', '/inference/v1/generate', '/v1/completions', '/v1/chat/completions'])
def test_a_stream_comes_piece_by_piece_and_ends_with_done(server, path):
    asked = {
        '/generate': body(5),
        '/inference/v1/generate': {
            'token_ids': PROMPT, 'sampling_params': {'max_tokens': 5, 'ignore_eos': True, 'seed': 0},
        },
        '/v1/completions': {'prompt': 'abc', 'max_tokens': 5, 'ignore_eos': True, 'seed': 0},
        '/v1/chat/completions': {
            'messages': [{'role': 'user', 'content': 'abc'}], 'max_tokens': 5, 'ignore_eos': True, 'seed': 0,
        },
    }[path]  # fmt: skip
    *events, last = server.read_stream(path, asked | {'stream': True})
    assert last == '[DONE]'
    text = ''.join('abcdefghi'[t - 1] for t in expected(5))
    if path == '/generate':
        lengths = [len(event['output_ids']) for event in events]  # what came together is one event
        assert lengths == sorted(set(lengths))
        assert [event['output_ids'] for event in events] == [expected(5)[:n] for n in lengths]
        assert [bool(event['meta_info']['finish_reason']) for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]['text'] == text
    elif path == '/inference/v1/generate':
        assert [t for event in events for t in event['choices'][0]['token_ids']] == expected(5)
        assert len(events) > 1
    else:
        pieces = [event['choices'][0] for event in events]
        texts = [one['text'] if 'text' in one else one['delta'].get('content', '') for one in pieces]
        assert ''.join(texts) == text
        assert pieces[-1]['finish_reason'] == 'length'


def test_the_model_name_is_echoed_and_not_checked(server):
    asked = {'model': 'anything', 'prompt': PROMPT, 'max_tokens': 1}
    status, reply = server.run(lambda client: client.post('/v1/completions', asked))
    assert (status, reply['model']) == (200, 'anything')


def test_a_stop_token_ends_an_answer_and_is_told(server):
    stop = expected(6)[2]
    asked = body(sampling={'stop_token_ids': [stop]})
    _, reply = server.run(lambda client: client.post('/generate', asked))
    assert reply['output_ids'] == expected(3)
    assert reply['meta_info']['finish_reason'] == {'type': 'stop', 'matched': stop}


@pytest.mark.parametrize('path', ['/generate', '/v1/completions'])
def test_a_stop_string_ends_text_and_answer_and_no_part_of_it_is_streamed(server, path):
    text = ''.join('abcdefghi'[t - 1] for t in expected(20))
    stop = text[4:6]
    asked = {
        '/generate': body(20, sampling={'stop': [stop]}),
        '/v1/completions': {'prompt': 'abc', 'max_tokens': 20, 'ignore_eos': True, 'seed': 0, 'stop': stop},
    }[path]
    *events, _ = server.run(lambda client: client.events(path, asked | {'stream': True}))
    if path == '/generate':
        assert all(text[:4].startswith(event['text']) for event in events)
        assert (events[-1]['text'], events[-1]['output_ids']) == (text[:4], expected(6))
        assert events[-1]['meta_info']['finish_reason'] == {'type': 'stop', 'matched': stop}
    else:
        assert ''.join(event['choices'][0]['text'] for event in events) == text[:4]
        assert events[-1]['choices'][0]['finish_reason'] == 'stop'


def test_the_tokens_of_a_prompt_that_was_there_are_told_and_salts_share_nothing(server):
    prompt = [4, 4, 4, 4, 4, 4]

    async def script(client):
        asked = body(2) | {'input_ids': prompt, 'logprob_start_len': -1}
        replies = [await client.post('/generate', asked | more) for more in ({}, {}, {'cache_salt': 'mine'})]
        return [reply['meta_info']['cached_tokens'] for _, reply in replies]

    assert server.run(script) == [0, 5, 0]


TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}
CALL = {'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': '{}'}}
USER = {'role': 'user', 'content': 'abc'}


@pytest.mark.parametrize(
    ('asked', 'field'),
    [
        ({'messages': [USER], 'tools': [TOOL]}, 'tools'),
        ({'messages': [USER, {'role': 'assistant', 'tool_calls': [CALL]}]}, 'messages[1].tool_calls'),
        ({'messages': [USER, {'role': 'tool', 'content': 'a'}]}, 'messages[1].role'),
    ],
)
def test_tools_are_refused_by_a_model_whose_template_has_none(server, asked, field):
    status, reply = server.run(lambda client: client.post('/v1/chat/completions', asked))
    assert (status, reply['error']['param']) == (400, field)
    assert 'the chat template of this model has no place for tools' in reply['error']['message']


class ToolTokenizer(CharacterTokenizer):
    """Its chats begin with a letter for each tool."""

    takes_tools = True

    def encode_chats(self, conversations, tools=()):
        assert all(turn.get('tool_calls', [TOOL])[0]['function']['name'] == 'add' for turn in conversations[0])
        [tokens] = super().encode_chats(conversations)
        return [np.concatenate([self.encode('a' * len(tools)), tokens])]


def test_tools_are_shown_by_a_model_whose_template_has_them_and_answers_stay_text():
    asked = {'messages': [USER, {'role': 'assistant', 'tool_calls': [CALL]}, {'role': 'tool', 'content': 'i'}]}
    asked |= {'tools': [TOOL, TOOL], 'max_tokens': 3, 'ignore_eos': True, 'seed': 0, 'return_token_ids': True}
    with ToyServer(tokenizer=ToolTokenizer('abcdefghi')) as server:
        status, reply = server.run(lambda client: client.post('/v1/chat/completions', asked))
    assert (status, reply['prompt_token_ids']) == (200, [1, 1, 1, 2, 3, 9])
    choice = reply['choices'][0]
    assert (choice['finish_reason'], len(choice['message']['content'])) == ('length', 3)
    assert choice['message'].keys() == {'role', 'content'}


@pytest.mark.parametrize('path', ['/v1/completions', '/v1/chat/completions'])
def test_a_stream_carries_the_ids_of_what_each_event_adds(server, path):
    asked = {'messages': [USER]} if 'chat' in path else {'prompt': 'abc'}
    asked |= {'max_tokens': 5, 'ignore_eos': True, 'seed': 0, 'return_token_ids': True, 'stream': True}
    *events, _ = server.run(lambda client: client.events(path, asked))
    choices = [event['choices'][0] for event in events]
    assert [token for choice in choices for token in choice['token_ids']] == expected(5)
    assert [choice.get('prompt_token_ids') for choice in choices] == [PROMPT] + [None] * (len(choices) - 1)


def test_what_came_while_a_reader_was_slow_is_one_piece(server):
    async def script(_):
        exchange = Exchange(Bridge(Inbox(), Texts(CharacterTokenizer('abcdefghi')), Limits(), context_tokens=400,
                                   vocab_size=10, seed=0), sglang.parse(body(5)))  # fmt: skip
        piece = lambda tokens, version: Piece(np.array(tokens), np.zeros(len(tokens)), version)
        for delivery in (Delivery([piece([1], '0')]), Delivery([piece([2, 3], '0')]), Delivery([piece([4], '1')])):
            exchange.put(0, delivery)
        exchange.put(0, Delivery([piece([5], '1')], 'length', version='1'))
        return [(part.tokens.tolist(), part.version, part.text) async for _, part in exchange.pieces()]

    assert server.run(script) == [([1, 2, 3], '0', 'abc'), ([4, 5], '1', 'de')]


class Inbox:
    def put(self, item):
        pass


def test_a_reader_that_leaves_frees_its_slot(server):
    ended = server.finished()

    async def script(client):
        for stream in (True, False):
            task = asyncio.ensure_future(client.events('/generate', body(390, stream=stream)))
            await until(lambda: _running(client, 1))
            task.cancel()
            await until(lambda: _running(client, 0))

    server.run(script)
    assert server.engine.open_requests() == []
    assert server.finished() == ended | {'cancelled': ended['cancelled'] + 2}  # none has run to its end


async def _running(client, count):
    _, info = await client.get('/server_info')
    return info['internal_states'][0]['running_requests'] == count


@pytest.mark.parametrize('path', ['/generate', '/inference/v1/generate', '/v1/completions', '/v1/chat/completions'])
@pytest.mark.parametrize('content', [b'{', b'[]', b'\xff', b'3', b'{}', b'{"input_ids": "x", "prompt": 3}'])
def test_malformed_bodies_get_400(server, path, content):
    status, reply = server.run(lambda client: client.post(path, data=content))
    assert status == 400
    assert reply['error']['message']


@pytest.mark.parametrize(('changed', 'says'), [
    ({'input_ids': [1] * 399}, 'do not fit the context of 400 tokens'),
    ({'input_ids': [1, 10]}, 'token 10'),
    ({'sampling_params': {'stop_token_ids': [1, 2, 3, 4, 5]}}, 'stop tokens'),
    ({'surprise': 1}, 'surprise'),
])  # fmt: skip
def test_what_the_model_can_not_take_is_refused_by_name(server, changed, says):
    asked = {'input_ids': PROMPT, 'sampling_params': {'max_new_tokens': 4}} | changed
    status, reply = server.run(lambda client: client.post('/generate', asked))
    assert status == 400
    assert says in reply['error']['message']
