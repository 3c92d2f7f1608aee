"""A model that gives no numbers: the request fails, the others go on, and the server says that it is not well."""

import asyncio
import threading

import numpy as np
import pytest

from tests.rollout.http.server.rig import PROMPT, ToyServer, body, write_weights
from tests.toys import token

BAD = [4, 4, 4]  # the prompt for which the model below gives no numbers


class BrokenServer(ToyServer):
    """Weights 0 give NaN as the log-prob of a token some way behind BAD, not before `begun` is set."""

    def __init__(self, **options):
        super().__init__(**options)
        self.begun = threading.Event()
        self.begun.set()
        generate = self.backend.generate

        def broken(weights, state, rows, steps):
            state, output = generate(weights, state, rows, steps)
            for row, one in enumerate(rows):
                if weights.w == 0 and one.request.prompt_tokens.tolist() == BAD and one.position > 20:
                    assert self.begun.wait(30), 'no event of the stream was read'
                    output.logprobs[0, row] = np.nan
            return state, output

        self.backend.generate = broken


def asked(path, prompt, new=40):
    sampling = {'max_tokens': new, 'ignore_eos': True, 'seed': 0}
    return {
        '/generate': body(new) | {'input_ids': prompt},
        '/inference/v1/generate': {'token_ids': prompt, 'sampling_params': sampling},
        '/v1/completions': {'prompt': prompt, **sampling},
    }[path]


@pytest.mark.parametrize('path', ['/generate', '/inference/v1/generate', '/v1/completions'])
def test_the_request_fails_and_the_others_are_answered_whole(path):
    async def script(client):
        others = [asyncio.ensure_future(client.post('/generate', body(150))) for _ in range(2)]
        failed = await client.post(path, asked(path, BAD))
        server.begun.clear()
        *_, event, done = await client.events(path, asked(path, BAD) | {'stream': True}, server.begun.set)
        return failed, event, done, [await other for other in others], await client.post('/generate', body(5))

    with BrokenServer() as server:
        (status, reply), event, done, others, later = server.run(script)
        assert server.engine.open_requests() == []
        assert server.service.open_requests() == 0
    sentence = reply['detail'] if path == '/generate' else reply['error']['message']
    assert status == 500
    assert 'the log-prob of a generated token is nan; get the files' in sentence
    assert 'learning_rate' not in sentence
    assert ('detail' if path == '/generate' else 'error') in event
    assert done == '[DONE]'
    whole = [token(0, 0, 0, position) for position in range(len(PROMPT), len(PROMPT) + 150)]
    assert [(status, reply['output_ids']) for status, reply in others] == [(200, whole)] * 2
    assert later[0] == 200


def test_the_server_is_not_healthy_until_it_has_other_weights(tmp_path):
    paths = ('/health', '/ping', '/ready')

    async def script(client):
        before = [(await client.get(path)) for path in paths]
        await client.post('/generate', body(40) | {'input_ids': BAD})
        await client.post('/generate', body(5))  # an answer that is well says nothing of the weights
        broken = [(await client.get(path)) for path in paths]
        await client.post('/update_weight_version', {'new_version': 'renamed'})
        renamed = await client.get('/health')
        metrics = (await client.get('/metrics'))[1]
        path = write_weights(tmp_path / 'v1', 3)
        await client.post('/update_weights_from_disk', {'model_path': path, 'weight_version': '1'})
        return before, broken, renamed, metrics, [(await client.get(path)) for path in paths]

    with BrokenServer() as server:
        before, broken, renamed, metrics, after = server.run(script)
    assert before == after == [(200, '')] * 3
    assert [status for status, _ in (*broken, renamed)] == [503] * 4
    assert broken[0][1]['status'] == 'unhealthy'
    assert "the weights of version '0' gave a log-prob that no policy can have" in broken[0][1]['reason']
    assert 'areal_jax_requests_failed_total 1\n' in metrics


def test_a_probe_that_generates_says_that_the_model_gives_no_numbers():
    class NoNumbers(ToyServer):
        def __init__(self):
            super().__init__()
            generate = self.backend.generate

            def broken(*arguments):
                state, output = generate(*arguments)
                output.logprobs[:] = np.nan
                return state, output

            self.backend.generate = broken

    with NoNumbers() as server:
        status, reply = server.run(lambda client: client.get('/health_generate'))
        health = server.run(lambda client: client.get('/health'))
    assert (status, health[0]) == (503, 503)
    assert 'is nan' in reply['reason']


def test_a_prompt_whose_scores_are_no_numbers_fails_and_the_server_says_so():
    prompt = {'prompt': PROMPT, 'echo': True, 'max_tokens': 0, 'logprobs': 1}

    async def script(client):
        failed = await client.post('/v1/completions', prompt)
        return failed, await client.get('/health')

    with ToyServer() as server:
        score = server.scoring.score

        def broken(program, weights, requests):
            found = score(program, weights, requests)
            found[0].logprobs[1] = np.nan
            return found

        server.scoring.score = broken
        (status, reply), (health, _) = server.run(script)
    assert (status, health) == (500, 503)
    assert 'the log-prob of a scored token is nan' in reply['error']['message']
