"""The routes of the tokenizer and of one model."""

import pytest

from areal_jax.text.file_tokenizers import HfTokenizer
from tests.rollout.http.server.rig import CONTEXT, ToyServer
from tests.text import vocabularies


@pytest.fixture(scope='module')
def server():
    with ToyServer() as server:
        yield server


def ask(server, path, body):
    return server.run(lambda client: client.post(path, body))


def test_a_text_has_ids_and_ids_a_text(server):
    status, reply = ask(server, '/tokenize', {'prompt': 'abc', 'model': 'any', 'add_special_tokens': False})
    assert (status, reply) == (
        200, {'count': 3, 'max_model_len': CONTEXT, 'tokens': [1, 2, 3], 'token_strs': None},
    )  # fmt: skip
    status, reply = ask(server, '/detokenize', {'tokens': [1, 2, 3], 'model': 'any'})
    assert (status, reply) == (200, {'prompt': 'abc', 'text': 'abc'})


class Llama2Server(ToyServer):
    """With a tokenizer that adds BOS, which its chat template writes too, and two ends."""

    vocabulary = 300


TEMPLATE = '{{ bos_token }}{{ messages[0].content }}'


@pytest.fixture(scope='module')
def llama2(tmp_path_factory):
    fields = {'bos_token': '<s>', 'chat_template': TEMPLATE}
    directory = vocabularies.write(tmp_path_factory.mktemp('llama2'), vocabularies.llama2(), **fields)
    (directory / 'generation_config.json').write_text('{"eos_token_id": [2, 5]}')
    with Llama2Server(tokenizer=HfTokenizer(directory)) as server:
        yield server


@pytest.mark.parametrize(('sent', 'ids'), [
    ({'prompt': 'a'}, [1, 271]),
    ({'prompt': 'a', 'add_special_tokens': True}, [1, 271]),
    ({'prompt': 'a', 'add_special_tokens': False}, [271]),
    ({'prompt': '<s>a', 'add_special_tokens': False}, [1, 271]),
    ({'prompt': ['a', 'b']}, [[1, 271], [1, 261, 263]]),
    ({'messages': [{'role': 'user', 'content': 'a'}]}, [1, 271]),
    ({'messages': [{'role': 'user', 'content': 'a'}], 'add_special_tokens': False}, [1, 271]),
])  # fmt: skip
def test_a_text_has_what_the_tokenizer_adds_and_a_conversation_what_its_template_writes(llama2, sent, ids):
    assert ask(llama2, '/tokenize', sent)[1]['tokens'] == ids


def test_prompts_have_it_too(llama2):
    def prompts(path, body):
        status, reply = ask(llama2, path, {'max_tokens': 1, 'return_token_ids': True} | body)
        assert status == 200, reply
        return [choice.get('prompt_token_ids', reply.get('prompt_token_ids')) for choice in reply['choices']]

    assert prompts('/v1/completions', {'prompt': ['a', 'b']}) == [[1, 271], [1, 261, 263]]
    assert prompts('/v1/completions', {'prompt': 'a', 'add_special_tokens': False}) == [[271]]
    assert prompts('/v1/completions', {'prompt': [271]}) == [[271]]
    assert prompts('/v1/chat/completions', {'messages': [{'role': 'user', 'content': 'a'}]}) == [[1, 271]]
    sampling = {'max_new_tokens': 1}
    _, reply = ask(llama2, '/generate', {'text': 'a', 'sampling_params': sampling})
    assert reply['meta_info']['prompt_tokens'] == 2


def test_each_end_of_the_files_ends_an_answer(llama2):
    def answer(**more):
        body = {'prompt': [271], 'max_tokens': 12, 'return_token_ids': True, 'ignore_eos': False} | more
        [choice] = ask(llama2, '/v1/completions', body)[1]['choices']
        return choice['token_ids'], choice['finish_reason']

    found = [answer(prompt=[271] * length) for length in range(1, 9)]
    assert {reason for _, reason in found} == {'stop'}
    assert {ids[-1] for ids, _ in found} == {2, 5}
    assert not any({2, 5} & set(ids[:-1]) for ids, _ in found)
    ids, reason = answer(ignore_eos=True)
    assert (len(ids), reason) == (12, 'length')
    assert {2, 5} & set(ids)


def test_the_texts_of_tokens_are_those_behind_others(llama2):
    reply = ask(llama2, '/tokenize', {'prompt': 'a', 'return_token_strs': True})[1]
    assert reply['token_strs'] == ['<s>', ' a']


def test_lists_have_lists(server):
    _, reply = ask(server, '/tokenize', {'prompt': ['abc', 'd'], 'return_token_strs': True})
    assert (reply['tokens'], reply['count'], reply['token_strs']) == (
        [[1, 2, 3], [4]], [3, 1], [['a', 'b', 'c'], ['d']],
    )  # fmt: skip
    assert ask(server, '/detokenize', {'tokens': [[1, 2], [], [3]]})[1]['text'] == ['ab', '', 'c']


def test_a_conversation_is_tokenized_in_the_form_of_the_model(server):
    messages = [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'c'}]
    assert ask(server, '/tokenize', {'messages': messages})[1]['tokens'] == [1, 2, 3]


def test_the_empty_text_has_no_ids(server):
    assert ask(server, '/tokenize', {'prompt': ''})[1]['tokens'] == []
    assert ask(server, '/detokenize', {'tokens': []})[1]['prompt'] == ''


@pytest.mark.parametrize(('skips', 'text'), [(None, 'a<eos>b<eos>'), (False, 'a<eos>b<eos>'), (True, 'ab')])
def test_special_tokens_are_spelled_out_unless_they_are_to_be_left_out(server, skips, text):
    assert ask(server, '/detokenize', {'tokens': [1, 0, 2, 0], 'skip_special_tokens': skips})[1]['text'] == text


def test_a_harness_learns_the_token_that_ends_an_answer(server):
    status, reply = server.run(lambda client: client.get('/tokenizer_info'))
    assert (status, reply) == (200, {'max_model_len': CONTEXT, 'vocab_size': 10, 'eos_token': '<eos>'})


@pytest.mark.parametrize(
    ('path', 'body', 'field'),
    [
        ('/tokenize', {}, 'prompt'),
        ('/tokenize', {'prompt': 5}, 'prompt'),
        ('/tokenize', {'prompt': []}, 'prompt'),
        ('/tokenize', {'prompt': ['a', 5]}, 'prompt'),
        ('/tokenize', {'prompt': 'xyz'}, 'prompt'),
        ('/tokenize', {'messages': []}, 'messages'),
        ('/tokenize', {'messages': [{'role': 'user', 'content': 'xyz'}]}, 'messages'),
        ('/tokenize', {'messages': [{'role': 'user', 'content': 'a'}], 'chat_template': 'x'}, 'chat_template'),
        (
            '/tokenize', {'messages': [{'role': 'user', 'content': 'a'}], 'add_generation_prompt': False},
            'add_generation_prompt',
        ),
        ('/tokenize', {'prompt': 'a', 'bogus': 1}, 'bogus'),
        (
            '/tokenize', {'messages': [{'role': 'user', 'content': 'a'}], 'add_special_tokens': True},
            'add_special_tokens',
        ),
        ('/detokenize', {}, 'tokens'),
        ('/detokenize', {'tokens': 'ab'}, 'tokens'),
        ('/detokenize', {'tokens': [10]}, 'tokens'),
        ('/detokenize', {'tokens': [[1], 'x']}, 'tokens[1]'),
        ('/detokenize', {'tokens': [1], 'skip_special_tokens': 1}, 'skip_special_tokens'),
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_refused_by_name(server, path, body, field):
    status, reply = ask(server, path, body)
    assert (status, reply['error']['param']) == (400, field)


def test_one_model_is_found_by_its_name(server):
    async def script(client):
        return [await client.get(path) for path in ('/v1/models', '/v1/models/toy', '/v1/models/org/other')]

    (_, listed), (status, one), (missing, error) = server.run(script)
    assert (status, one) == (200, listed['data'][0])
    assert one['max_model_len'] == CONTEXT
    assert (missing, error['error']['param']) == (404, 'model')
