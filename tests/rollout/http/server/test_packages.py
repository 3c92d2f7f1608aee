"""Packages of others against a running server. They are optional: `pip install openai renderers`."""

import asyncio
import types

import pytest

from tests.rollout.http.server.rig import PROMPT, ToyServer
from tests.toys import token

TOKENS = [token(0, 0, 0, position) for position in range(len(PROMPT), len(PROMPT) + 6)]
TEXT = ''.join('abcdefghi'[t - 1] for t in TOKENS)
MESSAGES = [{'role': 'user', 'content': 'abc'}]
ASKED = {'model': 'toy', 'max_tokens': 6, 'seed': 0}
IGNORE = {'extra_body': {'ignore_eos': True}}


@pytest.fixture(scope='module')
def server():
    with ToyServer(api_key='secret') as server:
        yield server


@pytest.fixture(scope='module')
def openai():
    return pytest.importorskip('openai')


@pytest.fixture
def client(server, openai):
    with openai.OpenAI(base_url=f'{server.url}/v1', api_key='secret', max_retries=0, timeout=20) as client:
        yield client


def test_chat(client):
    reply = client.chat.completions.create(messages=MESSAGES, logprobs=True, **ASKED, **IGNORE)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ('assistant', TEXT, 'length')
    assert [entry.token for entry in choice.logprobs.content] == list(TEXT)
    assert all(entry.logprob < 0 for entry in choice.logprobs.content)
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.completion_tokens) == ('toy', 3, 6)


def test_chat_streams(client):
    options = {'stream_options': {'include_usage': True}}
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **options, **ASKED, **IGNORE))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == 'assistant'
    assert ''.join(choice.delta.content or '' for choice in choices) == TEXT
    assert choices[-1].finish_reason == 'length'
    assert chunks[-1].usage.completion_tokens == 6


def test_completions_of_several_answers_with_token_ids(client):
    more = {'extra_body': {'ignore_eos': True, 'return_token_ids': True}}
    reply = client.completions.create(prompt=PROMPT, n=2, logprobs=0, **ASKED, **more)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].token_ids == TOKENS
    assert len(reply.choices[1].logprobs.token_logprobs) == 6
    streamed = client.completions.create(prompt='abc', stream=True, **ASKED, **IGNORE)
    assert ''.join(chunk.choices[0].text for chunk in streamed) == TEXT


def test_models(client):
    [model] = client.models.list().data
    assert (model.id, model.max_model_len) == ('toy', 400)


def test_refusals_are_the_errors_of_the_package(server, client, openai):
    with pytest.raises(openai.BadRequestError, match='temperature') as refused:
        client.chat.completions.create(messages=MESSAGES, temperature=-1, **ASKED)
    assert refused.value.param == 'temperature'
    tool = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}
    with pytest.raises(openai.BadRequestError, match='no place for tools'):
        client.chat.completions.create(messages=MESSAGES, tools=[tool], **ASKED)
    with pytest.raises(openai.BadRequestError, match='context of 400 tokens'):
        client.completions.create(prompt=[1] * 400, **ASKED)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key='wrong').models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model='toy', input='abc', encoding_format='float')


class Renderer:
    """Of one character a token, as the server's."""

    def get_stop_token_ids(self):
        return [8]

    def parse_response(self, token_ids, **_):
        text = ''.join('abcdefghi'[t - 1] for t in token_ids)
        return types.SimpleNamespace(content=text, reasoning_content=None, tool_calls=[], reasoning_complete=True)


def test_the_client_of_renderers(server, openai):
    """Its own generate(): the length of the context, the request, and what it demands of tokens and log-probs."""
    renderers = pytest.importorskip('renderers.client')

    async def script(sampling, prompt=PROMPT):
        async with openai.AsyncOpenAI(base_url=f'{server.url}/v1', api_key='secret', max_retries=0) as client:
            return await renderers.generate(
                client=client, renderer=Renderer(), messages=[], model='toy', prompt_ids=prompt,
                sampling_params={'temperature': 1.0, 'seed': 0, **sampling}, cache_salt='4', priority=0,
            )  # fmt: skip

    reply = asyncio.run(script({'max_tokens': 6, 'ignore_eos': True, 'top_p': 1.0}))
    stopped = TOKENS.index(8) + 1 if 8 in TOKENS else 6
    assert reply['completion_ids'] == TOKENS[:stopped]
    assert len(reply['completion_logprobs']) == stopped
    assert (reply['finish_reason'], reply['prompt_ids']) == ('stop' if 8 in TOKENS else 'length', PROMPT)
    with pytest.raises(renderers.OverlongPromptError):
        asyncio.run(script({'max_tokens': 1}, [1] * 401))
