"""Log-probs of prompts and alternatives over HTTP, in the notation of each dialect."""

import asyncio

import numpy as np
import pytest

from areal_jax.rollout.http.server.limits import Limits
from tests.rollout.http.server.rig import CONTEXT, PROMPT, ToyServer, body, until, write_weights
from tests.rollout.toy_scoring import score_of
from tests.toys import logprob, token

TEXT = 'abc'  # of PROMPT
ECHO = {'prompt': PROMPT, 'echo': True, 'logprobs': 1, 'max_tokens': 0}
GENERATED = {'max_tokens': 2, 'ignore_eos': True, 'seed': 0}


@pytest.fixture(scope='module')
def server():
    with ToyServer() as server:
        yield server


def prompt_scores(w=0, first=1):
    return [float(score_of(w, p, PROMPT[p])) for p in range(first, len(PROMPT))]


def best(position, w=0, temperature=1.0):
    return float(score_of(w, position, 0, temperature))


def answer_tokens(n=2):
    return [token(0, 0, 0, len(PROMPT) + i) for i in range(n)]


def test_a_prompt_is_scored_alone(server):
    status, reply = server.run(lambda client: client.post('/v1/completions', ECHO))
    assert status == 200, reply
    [choice] = reply['choices']
    assert (choice['text'], choice['finish_reason']) == (TEXT, 'length')
    found = choice['logprobs']
    assert found['tokens'] == list(TEXT)
    assert found['token_logprobs'] == [None, *prompt_scores()]
    assert found['text_offset'] == [0, 1, 2]
    assert found['top_logprobs'][0] is None
    assert [max(top.values()) for top in found['top_logprobs'][1:]] == [best(1), best(2)]
    assert [top[name] for top, name in zip(found['top_logprobs'][1:], 'bc', strict=True)] == prompt_scores()
    assert reply['usage'] == {'prompt_tokens': 3, 'completion_tokens': 0, 'total_tokens': 3}
    assert reply['metadata'] == {'weight_version': '0', 'weight_versions': [], 'scored_weight_version': '0'}


def test_what_is_generated_follows_the_echo_with_its_own_log_probs(server):
    asked = ECHO | GENERATED | {'prompt': TEXT}
    _, reply = server.run(lambda client: client.post('/v1/completions', asked))
    [choice] = reply['choices']
    names = ['abcdefghi'[t - 1] for t in answer_tokens()]
    assert choice['text'] == TEXT + ''.join(names)
    found = choice['logprobs']
    recorded = [float(np.float32(logprob(0, p))) for p in (3, 4)]
    assert found['tokens'] == [*TEXT, *names]
    assert found['token_logprobs'] == [None, *prompt_scores(), *recorded]
    assert [top[name] for top, name in zip(found['top_logprobs'][3:], names, strict=True)] == recorded
    assert found['text_offset'] == [0, 1, 2, 3, 4]


def test_alternatives_are_of_the_temperature_of_the_request_and_prompts_of_one(server):
    asked = ECHO | GENERATED | {'temperature': 1.5, 'prompt_logprobs': 2, 'logprobs': 3}
    _, reply = server.run(lambda client: client.post('/v1/completions', asked))
    [choice] = reply['choices']
    tops = choice['logprobs']['top_logprobs']
    assert [top[''] for top in tops[1:]] == pytest.approx(
        [best(1), best(2), best(3, temperature=1.5), best(4, temperature=1.5)]
    )
    assert choice['prompt_logprobs'][0] is None
    assert list(choice['prompt_logprobs'][1]) == ['0', '7', '2']  # two of the likeliest, and the token itself
    assert choice['prompt_logprobs'][1]['0'] == {'logprob': best(1), 'rank': 1, 'decoded_token': ''}
    assert choice['prompt_logprobs'][1]['2'] == {
        'logprob': prompt_scores()[0], 'rank': None, 'decoded_token': 'b',
    }  # fmt: skip


def test_an_echo_alone_needs_no_scores(server):
    passes = len(server.scoring.passes)
    asked = {'prompt': [PROMPT, [4]], 'echo': True, 'max_tokens': 0}
    _, reply = server.run(lambda client: client.post('/v1/completions', asked))
    assert [choice['text'] for choice in reply['choices']] == [TEXT, 'd']
    assert [choice['logprobs'] for choice in reply['choices']] == [None, None]
    assert len(server.scoring.passes) == passes


def test_a_prompt_of_one_token_has_no_log_prob(server):
    asked = ECHO | {'prompt': [5], 'prompt_logprobs': 1}
    _, reply = server.run(lambda client: client.post('/v1/completions', asked))
    [choice] = reply['choices']
    assert choice['logprobs'] == {
        'tokens': ['e'], 'token_logprobs': [None], 'top_logprobs': [None], 'text_offset': [0],
    }  # fmt: skip
    assert choice['prompt_logprobs'] == [None]
    assert reply['metadata']['weight_version'] == '0'


def test_prompts_of_one_request_and_of_several_share_passes(server):
    async def script(client):
        passes, asked = len(server.scoring.passes), ECHO | {'prompt': [PROMPT] * 4}
        await client.post('/pause_generation', {'mode': 'retract'})
        posts = [asyncio.ensure_future(client.post('/v1/completions', asked)) for _ in range(4)]
        await until(lambda: _waits(server, 16))  # however late one of them comes, no pass goes without it
        await client.post('/continue_generation', {})
        await asyncio.gather(*posts)
        return server.scoring.passes[passes:]

    passes = server.run(script)
    assert [len(one) for one in passes] == [3] * 5 + [1]  # a row holds three


def test_the_echo_of_a_stream_is_its_first_event(server):
    asked = ECHO | GENERATED | {'logprobs': 0, 'stream': True}
    *events, last = server.run(lambda client: client.events('/v1/completions', asked))
    choices = [event['choices'][0] for event in events]
    assert choices[0]['text'].startswith(TEXT)
    assert ''.join(choice['text'] for choice in choices) == TEXT + ''.join('abcdefghi'[t - 1] for t in answer_tokens())
    assert [v for choice in choices for v in choice['logprobs']['token_logprobs']] == [
        None, *prompt_scores(), *(float(np.float32(logprob(0, p))) for p in (3, 4)),
    ]  # fmt: skip
    assert [o for choice in choices for o in choice['logprobs']['text_offset']] == [0, 1, 2, 3, 4]
    assert last == '[DONE]'


def test_a_prompt_that_is_scored_alone_can_be_streamed(server):
    asked = ECHO | {'logprobs': 0, 'stream': True}
    event, last = server.run(lambda client: client.events('/v1/completions', asked))
    assert (event['choices'][0]['text'], event['choices'][0]['finish_reason'], last) == (TEXT, 'length', '[DONE]')
    assert event['choices'][0]['logprobs']['token_logprobs'] == [None, *prompt_scores()]


def test_chat_has_alternatives_and_prompt_log_probs(server):
    asked = GENERATED | {
        'messages': [{'role': 'user', 'content': TEXT}], 'logprobs': True, 'top_logprobs': 2, 'prompt_logprobs': 0,
        'return_tokens_as_token_ids': True,
    }  # fmt: skip
    _, reply = server.run(lambda client: client.post('/v1/chat/completions', asked))
    content = reply['choices'][0]['logprobs']['content']
    assert [[top['token'] for top in entry['top_logprobs']] for entry in content] == [['token_id:0', 'token_id:7']] * 2
    assert content[0]['top_logprobs'][0]['logprob'] == best(3)
    assert [next(iter(entry.values()))['logprob'] for entry in reply['prompt_logprobs'][1:]] == prompt_scores()


def test_the_route_of_vllm(server):
    asked = {'token_ids': PROMPT, 'sampling_params': GENERATED | {'logprobs': 2, 'prompt_logprobs': 1}}
    _, reply = server.run(lambda client: client.post('/inference/v1/generate', asked))
    assert [entry and list(entry) for entry in reply['prompt_logprobs']] == [None, ['0', '2'], ['0', '3']]
    [entry, _] = reply['choices'][0]['logprobs']['content']
    assert entry['top_logprobs'] == [
        {'token_id': 0, 'token': 'token_id:0', 'logprob': best(3), 'rank': 1},
        {'token_id': 7, 'token': 'token_id:7', 'logprob': best(3), 'rank': 2},
    ]
    assert reply['scored_weight_version'] == '0'
    plain = server.run(lambda client: client.post('/inference/v1/generate', {
        'token_ids': PROMPT, 'sampling_params': GENERATED | {'logprobs': 1},
    }))[1]  # fmt: skip
    assert plain['choices'][0]['logprobs']['content'][0]['top_logprobs'] == []


@pytest.mark.parametrize('start', [0, 1, 2])
def test_the_route_of_sglang(server, start):
    asked = body(2) | {'logprob_start_len': start, 'top_logprobs_num': 1}
    _, reply = server.run(lambda client: client.post('/generate', asked))
    meta = reply['meta_info']
    values = [None, *prompt_scores(first=start + 1)]
    assert meta['input_token_logprobs'] == [[v, t, None] for v, t in zip(values, PROMPT[start:], strict=True)]
    assert meta['input_top_logprobs'] == [None, *([[best(p), 0, None]] for p in range(start + 1, 3))]
    assert meta['output_top_logprobs'] == [[[best(3), 0, None]], [[best(4), 0, None]]]


def test_sglang_scores_a_prompt_alone(server):
    asked = body(0) | {'logprob_start_len': 0}
    _, reply = server.run(lambda client: client.post('/generate', asked))
    assert (reply['text'], reply['output_ids']) == ('', [])
    assert reply['meta_info']['finish_reason'] == {'type': 'length', 'length': 0}
    assert [entry[0] for entry in reply['meta_info']['input_token_logprobs']] == [None, *prompt_scores()]


def test_what_the_client_of_a_run_asks_for_needs_no_pass(server):
    passes = len(server.scoring.passes)
    server.run(lambda client: client.post('/generate', body(2)))
    assert len(server.scoring.passes) == passes


def test_samples_of_a_prompt_have_its_scores_and_alternatives_of_their_own(server):
    asked = ECHO | GENERATED | {'n': 2}
    _, reply = server.run(lambda client: client.post('/v1/completions', asked))
    one, two = [choice['logprobs'] for choice in reply['choices']]
    assert one['token_logprobs'][:3] == two['token_logprobs'][:3] == [None, *prompt_scores()]
    assert None not in one['top_logprobs'][3:] + two['top_logprobs'][3:]


@pytest.mark.parametrize(
    ('asked', 'sentence'),
    [
        (ECHO | {'echo': False}, 'max_tokens=0 generates nothing'),
        (ECHO | {'logprobs': 21}, 'logprobs=21 must be an integer from 0 to 20'),
        (ECHO | {'prompt': [1] * (CONTEXT + 1)}, f'do not fit the context of {CONTEXT} tokens'),
        (ECHO | {'prompt': [[1] * CONTEXT] * 2}, f'log-probs of {2 * CONTEXT - 2} prompt tokens in one request'),
    ],
)  # fmt: skip
def test_what_can_not_be_scored_is_refused(asked, sentence):
    with ToyServer(limits=Limits(scored_tokens=CONTEXT)) as server:
        status, reply = server.run(lambda client: client.post('/v1/completions', asked))
    assert status == 400
    assert sentence in reply['error']['message']


def test_a_prompt_as_long_as_the_context_is_scored(server):
    status, reply = server.run(lambda client: client.post('/v1/completions', ECHO | {'prompt': [1] * CONTEXT}))
    assert status == 200
    assert len(reply['choices'][0]['logprobs']['tokens']) == CONTEXT


def test_a_pause_holds_scoring_and_an_abort_ends_it():
    with ToyServer() as server:

        async def script(client):
            await client.post('/pause_generation', {'mode': 'retract'})
            held = asyncio.ensure_future(client.post('/v1/completions', ECHO))
            named = asyncio.ensure_future(client.post('/generate', body(0) | {'logprob_start_len': 0, 'rid': 'x'}))
            await until(lambda: _waits(server, 2))
            assert server.scoring.passes == []
            await client.post('/abort_request', {'rid': 'x'})
            _, aborted = await named
            await client.post('/continue_generation', {})
            return aborted, await held

        aborted, (status, reply) = server.run(script)
    assert aborted['meta_info']['finish_reason']['type'] == 'abort'
    assert [entry[0] for entry in aborted['meta_info']['input_token_logprobs']] == [None] * 3
    assert (status, reply['choices'][0]['logprobs']['token_logprobs']) == (200, [None, *prompt_scores()])


async def _waits(server, n):
    return server.scorer.waiting == n


def test_a_reader_that_leaves_is_not_scored():
    with ToyServer() as server:

        async def script(client):
            await client.post('/pause_generation', {'mode': 'retract'})
            left = asyncio.ensure_future(client.post('/v1/completions', ECHO))
            await until(lambda: _waits(server, 1))
            left.cancel()
            await until(lambda: _waits(server, 0))
            await client.post('/continue_generation', {})

        server.run(script)
        assert server.scoring.passes == []


def test_scores_are_of_the_weights_that_were_loaded(tmp_path):
    with ToyServer() as server:

        async def script(client):
            before = await client.post('/v1/completions', ECHO)
            path = write_weights(tmp_path / 'w3', 3)
            await client.post('/update_weights_from_disk', {'model_path': path, 'weight_version': 'third'})
            return before, await client.post('/v1/completions', ECHO)

        (_, before), (_, after) = server.run(script)
    assert before['metadata']['scored_weight_version'] == '0'
    assert after['metadata']['scored_weight_version'] == 'third'
    assert after['choices'][0]['logprobs']['token_logprobs'] == [None, *prompt_scores(3)]


def test_an_answer_that_lived_through_an_update_has_no_alternatives(tmp_path):
    with ToyServer() as server:

        async def script(client):
            asked = ECHO | GENERATED | {'max_tokens': 100}
            answer = asyncio.ensure_future(client.post('/v1/completions', asked))
            await until(lambda: _has_begun(server))
            path = write_weights(tmp_path / 'w3', 3)
            await client.post('/update_weights_from_disk', {'model_path': path, 'weight_version': 'third'})
            return await answer

        _, reply = server.run(script)
    found = reply['choices'][0]['logprobs']
    assert len(reply['metadata']['weight_versions']) == 2
    assert reply['metadata']['scored_weight_version'] == 'third'
    assert found['token_logprobs'][:3] == [None, *prompt_scores(3)]
    assert found['top_logprobs'][3:] == [None] * 100
    assert None not in found['token_logprobs'][3:]


async def _has_begun(server):
    return len(server.backend.batches) > 3


def test_metrics_count_what_is_scored(server):
    async def script(client):
        await client.post('/v1/completions', ECHO)
        return await client.get('/metrics')

    _, text = server.run(script)
    lines = dict(line.rsplit(' ', 1) for line in text.splitlines() if not line.startswith('#'))
    assert int(lines['areal_jax_scored_tokens_total']) >= 3
    assert lines['areal_jax_scoring_waiting'] == '0'
    assert int(lines['areal_jax_scoring_programs']) in (1, 2)
