"""OpenAI's completions: every field of the request, every field of the reply, and the stream."""

import pytest

from areal_jax.rollout.http.wire import completions
from areal_jax.rollout.http.wire.exchange import CallSampling, Finish, RequestError
from areal_jax.rollout.http.wire.openai import render_models
from tests.rollout.http.wire.calls import INFO, answer, stream

BODY = {'model': 'm', 'prompt': [11, 12, 13], 'max_tokens': 4}


def test_a_prompt_is_text_or_ids_one_or_many():
    assert completions.parse({'prompt': 'once'}).prompts == ('once',)
    assert completions.parse({'prompt': ['a', 'b']}).prompts == ('a', 'b')
    assert [p.tolist() for p in completions.parse({'prompt': [[1], [2, 3]]}).prompts] == [[1], [2, 3]]
    call = completions.parse(BODY)
    assert (call.prompts[0].tolist(), call.prompt_field, call.model) == ([11, 12, 13], 'prompt', 'm')
    assert (call.sampling, call.logprobs, call.stream) == ((CallSampling(4),), False, False)
    assert completions.parse({'prompt': 'x'}).sampling[0].max_new_tokens == 16


def test_sampling_and_several_answers():
    call = completions.parse(BODY | {
        'n': 2, 'best_of': 2, 'temperature': 0, 'top_p': 0.9, 'stop': 'END', 'seed': 5, 'logit_bias': {'7': -1},
        'presence_penalty': 0.1, 'frequency_penalty': 0.2, 'top_k': 3, 'min_p': 0.1, 'repetition_penalty': 1.1,
        'min_tokens': 1, 'ignore_eos': True, 'stop_token_ids': [2], 'logprobs': 0, 'request_id': 'x',
    })  # fmt: skip
    assert call.sampling == (CallSampling(
        4, min_new_tokens=1, temperature=0.0, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.1, frequency_penalty=0.2, logit_bias=((7, -1.0),), stop_tokens=(2,), stop_strings=('END',),
        ignore_eos=True, seed=5,
    ),)  # fmt: skip
    assert (call.n, call.logprobs, call.request_ids) == (2, True, ('x_0', 'x_1'))


def test_fields_without_a_meaning_here_are_accepted():
    completions.parse(BODY | {'user': 'u', 'metadata': {'a': 'b'}, 'store': True, 'echo': False, 'suffix': None})


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'prompt': None}, 'prompt'),
        ({'prompt': ''}, 'prompt'),
        ({'prompt': []}, 'prompt'),
        ({'prompt': ['a', '']}, 'prompt'),
        ({'prompt': ['a', 1]}, 'prompt'),
        ({'prompt': [1, 'a']}, 'prompt'),
        ({'prompt': [[1], []]}, 'prompt[1]'),
        ({'prompt': [1, -1]}, 'prompt'),
        ({'prompt': {'a': 1}}, 'prompt'),
        ({'max_tokens': 0}, 'max_tokens'),
        ({'n': 0}, 'n'),
        ({'best_of': 3}, 'best_of'),
        ({'echo': 1}, 'echo'),
        ({'suffix': 'x'}, 'suffix'),
        ({'logprobs': 21}, 'logprobs'),
        ({'logprobs': 2, 'stream': True}, 'logprobs'),
        ({'prompt_logprobs': -1}, 'prompt_logprobs'),
        ({'prompt_logprobs': 1, 'stream': True}, 'prompt_logprobs'),
        ({'max_tokens': 0, 'echo': True, 'logprobs': 1, 'n': 2}, 'n'),
        ({'logprobs': True}, 'logprobs'),
        ({'stream': 'x'}, 'stream'),
        ({'stream_options': {'x': 1}}, 'stream_options.x'),
        ({'stream': True, 'return_meta_info': True}, 'return_meta_info'),
        ({'temperature': 'hot'}, 'temperature'),
        ({'messages': []}, 'messages'),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises(RequestError) as error:
        completions.parse(BODY | changes)
    assert error.value.field == field
    assert str(error.value).startswith(f'{field}=')


def test_the_reply_has_every_field():
    call = completions.parse(BODY | {'logprobs': 0, 'return_token_ids': True, 'return_tokens_as_token_ids': True})
    assert completions.render(call, [answer()], INFO) == {
        'id': 'cmpl-r', 'object': 'text_completion', 'created': 1795234194, 'model': 'm',
        'usage': {'prompt_tokens': 3, 'completion_tokens': 5, 'total_tokens': 8},
        'metadata': {
            'weight_version': '4',
            'weight_versions': [{'version': '3', 'start': 0, 'end': 2}, {'version': '4', 'start': 2, 'end': 5}],
        },
        'choices': [{
            'index': 0, 'text': 'abcd', 'finish_reason': 'stop', 'stop_reason': None,
            'token_ids': [21, 22, 23, 24, 2], 'prompt_token_ids': [11, 12, 13],
            'logprobs': {
                'tokens': ['token_id:21', 'token_id:22', 'token_id:23', 'token_id:24', 'token_id:2'],
                'token_logprobs': [-0.5, -1.25, -2.0, -0.125, -0.75], 'top_logprobs': None,
                'text_offset': [0, 11, 22, 33, 44],
            },
        }],
    }  # fmt: skip


def test_parts_come_when_they_are_asked_for():
    plain = completions.render(completions.parse(BODY), [answer()], INFO)['choices'][0]
    assert set(plain) == {'index', 'text', 'finish_reason', 'stop_reason', 'logprobs'}
    assert plain['logprobs'] is None
    call = completions.parse(BODY | {'return_meta_info': True, 'return_sampling_logprobs': True, 'logprobs': 0})
    choice = completions.render(call, [answer(finish=Finish('abort'))], INFO)['choices'][0]
    assert (choice['finish_reason'], choice['meta_info']['finish_reason']['type']) == ('abort', 'abort')
    assert choice['sampling_logprobs'] == [-0.25, -0.5, -2.0, -0.125, -0.75]
    assert choice['logprobs']['tokens'] == ['<21>', '<22>', '<23>', '<24>', '<2>']


def test_a_stream_adds_up_to_the_reply():
    body = BODY | {
        'stream': True, 'stream_options': {'include_usage': True}, 'logprobs': 0, 'return_token_ids': True, 'n': 2,
    }  # fmt: skip
    call = completions.parse(body)
    *events, usage = stream(completions, call, ('r_0', 'r_1'))
    assert {(event['id'], event['object']) for event in [*events, usage]} == {('cmpl-r', 'text_completion')}
    assert (usage['choices'], usage['usage']) == (
        [], {'prompt_tokens': 3, 'completion_tokens': 10, 'total_tokens': 13},
    )  # fmt: skip
    choices = [event['choices'][0] for event in events if event['choices'][0]['index'] == 1]
    assert [choice['text'] for choice in choices] == ['ab', 'cd']
    assert [choice['finish_reason'] for choice in choices] == [None, 'stop']
    assert [choice['token_ids'] for choice in choices] == [[21, 22], [23, 24, 2]]
    assert [choice.get('prompt_token_ids') for choice in choices] == [[11, 12, 13], None]
    assert choices[1]['logprobs']['text_offset'][0] == 2
    assert [event.get('metadata') is None for event in events[:2]] == [True, False]
    assert len(stream(completions, completions.parse(BODY | {'stream': True}))) == 2


def test_the_list_of_models_has_the_length_of_the_context():
    assert render_models(INFO, 2048) == {'object': 'list', 'data': [{
        'id': 'served', 'object': 'model', 'created': 1795234194, 'owned_by': 'areal_jax', 'root': 'served',
        'parent': None, 'max_model_len': 2048,
    }]}  # fmt: skip
