"""SGLang's /generate: every field of the request, every field of the reply, both ways round."""

import dataclasses
import json

import numpy as np
import pytest

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.rollout.http.wire import sglang
from areal_jax.rollout.http.wire.encoding import parse_event
from areal_jax.rollout.http.wire.exchange import (
    Answer,
    CallSampling,
    Finish,
    Piece,
    ReplyError,
    RequestError,
    Span,
    name_answers,
)
from tests.rollout.http.wire.calls import INFO, PROMPT, answer, stream

BODY = {
    'rid': 'g42-s0', 'input_ids': [101, 102, 103],
    'sampling_params': {
        'max_new_tokens': 64, 'temperature': 1.0, 'top_p': 1.0, 'top_k': -1, 'min_p': 0.0, 'n': 1, 'stop': ['\n\n'],
        'stop_token_ids': [2], 'ignore_eos': False, 'skip_special_tokens': False, 'min_new_tokens': 0,
        'frequency_penalty': 0.0, 'presence_penalty': 0.0, 'repetition_penalty': 1.0, 'sampling_seed': None,
    },
    'return_logprob': True, 'logprob_start_len': 2, 'top_logprobs_num': 0, 'return_text_in_logprobs': False,
    'stream': False,
}  # fmt: skip
WANTED = {'input_ids': PROMPT.tolist(), 'return_logprob': True, 'logprob_start_len': 2}


def test_the_request_of_reinforcement_learning():
    call = sglang.parse(BODY)
    assert [prompt.tolist() for prompt in call.prompts] == [[101, 102, 103]]
    assert (call.request_ids, call.n, call.is_batch, call.stream) == (('g42-s0',), 1, False, False)
    assert (call.logprobs, call.prompt_starts, call.text_in_logprobs) == (True, (2,), False)
    assert call.sampling == (
        CallSampling(64, stop_tokens=(2,), stop_strings=('\n\n',), skip_special_tokens=False),
    )  # fmt: skip


def test_defaults_are_those_of_the_dialect():
    call = sglang.parse({'text': 'once'})
    assert (call.prompts, call.prompt_field, call.sampling) == (('once',), 'text', (CallSampling(128),))
    assert (call.logprobs, call.prompt_starts, call.request_ids) == (False, (), ('',))


def test_a_batch_has_parameters_and_ids_for_each_prompt():
    parameters = [{'max_new_tokens': 1, 'n': 2}, {'max_new_tokens': 2, 'n': 2}]
    call = sglang.parse({
        'input_ids': [[1, 2], [3, 4, 5]], 'sampling_params': parameters, 'rid': ['a', 'b'],
        'return_logprob': [True, True], 'logprob_start_len': [1, 2],
    })  # fmt: skip
    assert (call.is_batch, call.n, call.n_answers, call.prompt_starts) == (True, 2, 4, (1, 2))
    assert call.request_ids == ('a_0', 'a_1', 'b_0', 'b_1')
    assert [sampling.max_new_tokens for sampling in call.sampling] == [1, 2]
    assert sglang.parse({'text': ['a', 'b'], 'rid': 'x'}).request_ids == ('x_0', 'x_1')
    assert sglang.parse({'input_ids': [[1]], 'rid': 'x'}).request_ids == ('x',)


def test_routing_and_classes_are_read():
    call = sglang.parse({'input_ids': [1], 'session_id': 's', 'cache_salt': '4', 'priority': -1, 'model': 'any'})
    assert (call.session, call.cache_salt, call.priority, call.model) == ('s', '4', -1, 'any')


def test_the_log_probs_of_the_cut_softmax_are_asked_for():
    call = sglang.parse({'input_ids': [1], 'return_logprob': True, 'sampling_logprobs_mode': 'selected'})
    assert (call.logprobs, call.columns) == (True, ('sampling_logprobs',))


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'input_ids': None}, 'input_ids'),
        ({'text': 'both'}, 'input_ids'),
        ({'input_ids': []}, 'input_ids'),
        ({'input_ids': 'abc'}, 'input_ids'),
        ({'input_ids': [1, -5]}, 'input_ids'),
        ({'input_ids': [1, 2.0]}, 'input_ids'),
        ({'input_ids': [1, True]}, 'input_ids'),
        ({'input_ids': [[1], []]}, 'input_ids[1]'),
        ({'input_ids': [[1], 2]}, 'input_ids[1]'),
        ({'input_ids': [2**31]}, 'input_ids'),
        ({'input_ids': None, 'text': ''}, 'text'),
        ({'input_ids': None, 'text': []}, 'text'),
        ({'input_ids': None, 'text': [1]}, 'text'),
        ({'sampling_params': 3}, 'sampling_params'),
        ({'sampling_params': [{}, {}]}, 'sampling_params'),
        ({'sampling_params': {'max_new_tokens': 0}}, 'sampling_params.max_new_tokens'),
        ({'sampling_params': {'temperature': -1}}, 'sampling_params.temperature'),
        ({'sampling_params': {'n': 0}}, 'sampling_params.n'),
        ({'sampling_params': {'n': 10_000}}, 'sampling_params.n'),
        ({'sampling_params': {'regex': 'a*'}}, 'sampling_params.regex'),
        ({'sampling_params': {'max_tokens': 3}}, 'sampling_params.max_tokens'),
        ({'sampling_params': [{'min_p': 2}]}, 'sampling_params[0].min_p'),
        ({'return_logprob': 1}, 'return_logprob'),
        ({'return_logprob': [True, False]}, 'return_logprob'),
        ({'return_logprob': True, 'logprob_start_len': 4}, 'logprob_start_len'),
        ({'return_logprob': True, 'logprob_start_len': -2}, 'logprob_start_len'),
        ({'return_logprob': True, 'logprob_start_len': True}, 'logprob_start_len'),
        ({'return_logprob': True, 'top_logprobs_num': 21}, 'top_logprobs_num'),
        ({'return_logprob': True, 'top_logprobs_num': 2, 'stream': True}, 'top_logprobs_num'),
        ({'return_logprob': True, 'logprob_start_len': [1, 1]}, 'logprob_start_len'),
        ({'top_logprobs_num': 5}, 'top_logprobs_num'),
        ({'return_sampling_mask': True}, 'return_sampling_mask'),
        ({'sampling_logprobs_mode': 'support'}, 'sampling_logprobs_mode'),
        ({'image_data': ['x']}, 'image_data'),
        ({'rid': 5}, 'rid'),
        ({'rid': ['a', 'b']}, 'rid'),
        ({'stream': 'yes'}, 'stream'),
        ({'priority': 'high'}, 'priority'),
        ({'inputs': [1]}, 'inputs'),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises(RequestError) as error:
        sglang.parse({'input_ids': [1, 2, 3]} | changes)
    assert (error.value.field, error.value.status) == (field, 400)
    assert str(error.value).startswith(field)
    assert '\n' not in str(error.value)


def test_prompts_of_a_batch_may_differ_in_what_is_listed_but_not_in_their_number_of_samples():
    body = {'input_ids': [[1, 2], [1, 2, 3]], 'return_logprob': True}
    call = sglang.parse(body | {'logprob_start_len': [0, -1]})
    assert [(call.prompt_start(i), call.scored_from(i)) for i in range(2)] == [(0, 1), (3, 3)]
    with pytest.raises(RequestError, match=r'^top_logprobs_num='):
        sglang.parse(body | {'top_logprobs_num': [1, 2]})
    with pytest.raises(RequestError, match=r'^sampling_params\.n='):
        sglang.parse({'input_ids': [[1], [2]], 'sampling_params': [{'n': 1}, {'n': 2}]})


def test_fields_that_change_nothing_are_accepted():
    sglang.parse({'input_ids': [1], 'image_data': [], 'lora_path': None, 'return_routed_experts': False})
    sglang.parse({'input_ids': [1], 'logprob_start_len': 0})  # no log-probs are wanted


def test_the_reply_has_every_field():
    assert json.loads(json.dumps(sglang.render(sglang.parse(WANTED), [answer('g42-s0')], INFO))) == {
        'text': 'abcd',
        'output_ids': [21, 22, 23, 24, 2],
        'meta_info': {
            'id': 'g42-s0', 'finish_reason': {'type': 'stop', 'matched': 2}, 'prompt_tokens': 3,
            'completion_tokens': 5, 'cached_tokens': 1, 'num_retractions': 0, 'weight_version': '4',
            'weight_versions': [{'version': '3', 'start': 0, 'end': 2}, {'version': '4', 'start': 2, 'end': 5}],
            'input_token_logprobs': [[None, 13, None]],
            'output_token_logprobs': [
                [-0.5, 21, None], [-1.25, 22, None], [-2.0, 23, None], [-0.125, 24, None], [-0.75, 2, None],
            ],
            'output_token_logprobs_length': 5, 'e2e_latency': 0.42,
        },
    }  # fmt: skip


def test_log_probs_are_there_as_they_were_asked_for():
    plain = sglang.render(sglang.parse({'input_ids': [11, 12, 13]}), [answer()], INFO)
    assert not [name for name in plain['meta_info'] if 'logprob' in name]
    call = sglang.parse(WANTED | {'return_text_in_logprobs': True, 'sampling_logprobs_mode': 'selected'})
    meta = sglang.render(call, [answer()], INFO)['meta_info']
    assert meta['output_token_logprobs'][1] == [-1.25, 22, '<22>']
    assert meta['output_token_sampling_logprobs'] == [-0.25, -0.5, -2.0, -0.125, -0.75]
    only_output = sglang.render(sglang.parse(WANTED | {'logprob_start_len': -1}), [answer()], INFO)
    assert only_output['meta_info']['input_token_logprobs'] == []


def test_float32_survives_the_wire():
    exact = np.float32(-1.1920929)
    found = Answer('r', PROMPT, pieces=[answer().pieces[0]], finish=Finish('length'))
    found.pieces[0].logprobs[0] = exact
    call = sglang.parse(WANTED)
    (back,) = sglang.parse_reply(json.loads(json.dumps(sglang.render(call, [found], INFO))), call)
    assert back.logprobs[0] == exact


def test_a_list_answers_a_batch_and_n():
    both = [answer('a'), answer('b', 1)]
    assert len(sglang.render(sglang.parse({'input_ids': [1], 'sampling_params': {'n': 2}}), both, INFO)) == 2
    assert isinstance(sglang.render(sglang.parse({'input_ids': [[1]]}), [answer()], INFO), list)
    assert isinstance(sglang.render(sglang.parse({'input_ids': [1]}), [answer()], INFO), dict)


@pytest.mark.parametrize(
    ('finish', 'rendered'),
    [
        (Finish('stop', '\n'), {'type': 'stop', 'matched': '\n'}),
        (Finish('length'), {'type': 'length', 'length': 5}),
        (Finish('abort'), {'type': 'abort', 'message': 'Aborted', 'status_code': None, 'err_type': None}),
        (None, None),
    ],
)
def test_how_an_answer_ended(finish, rendered):
    reply = sglang.render(sglang.parse(WANTED), [answer(finish=finish)], INFO)
    assert reply['meta_info']['finish_reason'] == rendered
    (back,) = sglang.parse_reply(reply, sglang.parse(WANTED))
    assert (
        (back.finish.reason, back.finish.matched) == (finish.reason, finish.matched) if finish else back.finish is None
    )


def test_an_abort_before_the_first_token_has_no_tokens():
    queued = Answer('r', PROMPT, finish=Finish('abort', message='Abort in waiting queue'), version='4')
    call = sglang.parse(WANTED)
    reply = sglang.render(call, [queued], INFO)
    assert (reply['output_ids'], reply['meta_info']['output_token_logprobs']) == ([], [])
    (back,) = sglang.parse_reply(reply, call)
    assert (back.n_tokens, back.finish.message, back.version) == (0, 'Abort in waiting queue', '4')
    # older servers leave out what they do not have
    bare = {'text': '', 'meta_info': {'id': 'r', 'finish_reason': {'type': 'abort', 'message': 'Abort before prefill'}}}
    assert sglang.parse_reply(bare, call)[0].n_tokens == 0


def test_a_stream_is_cumulative_and_says_its_versions_at_each_event():
    call = sglang.parse(WANTED | {'stream': True})
    first, last = stream(sglang, call)
    assert (first['text'], first['output_ids'], first['meta_info']['finish_reason']) == ('ab', [21, 22], None)
    assert first['meta_info']['weight_versions'] == [{'version': '3', 'start': 0, 'end': 2}]
    assert json.loads(json.dumps(sglang.render(call, [answer('r')], INFO)))['text'] == last['text'] == 'abcd'
    assert last['meta_info']['finish_reason'] == {'type': 'stop', 'matched': 2}
    (partial,), (whole,) = sglang.parse_reply(first, call), sglang.parse_reply(last, call)
    assert (partial.finish, partial.spans, whole.spans) == (None, [Span('3', 0, 2)], answer().spans)


def test_events_of_several_answers_are_told_apart():
    call = sglang.parse({'input_ids': [[1], [2]], 'stream': True})
    assert [event['index'] for event in stream(sglang, call, ('a', 'b'))] == [0, 0, 1, 1]


def test_refusals_have_the_form_of_the_dialect():
    assert sglang.render_error('too long', 400, 'input_ids') == {'error': {'message': 'too long'}}
    assert sglang.render_error('broken', 503) == {'detail': 'broken'}


@pytest.mark.parametrize('changes', [{}, {'sampling_params': {'n': 2}, 'rid': None}, {'stream': True}])
def test_the_server_reads_what_the_client_writes(changes):
    given = sglang.parse(BODY | {'session_id': 's', 'cache_salt': '4', 'priority': 3} | changes)
    back = sglang.parse(json.loads(json.dumps(sglang.render_request(given))))
    assert back.prompts[0].tolist() == given.prompts[0].tolist()
    for name in (
        'sampling',
        'n',
        'request_ids',
        'stream',
        'logprobs',
        'prompt_starts',
        'session',
        'cache_salt',
        'priority',
    ):
        assert getattr(back, name) == getattr(given, name), name
    assert back.prompt_starts == (2,)  # servers repeat entries of long answers without it


@pytest.mark.parametrize('body', [WANTED, WANTED | {'sampling_logprobs_mode': 'selected'}])
def test_the_client_reads_what_the_server_writes(body):
    call = name_answers(sglang.parse(body), 'r')
    (back,) = sglang.parse_reply(json.loads(json.dumps(sglang.render(call, [answer()], INFO))), call, vocab_size=32)
    assert (back.spans, back.finish, back.version, back.request_id) == (answer().spans, Finish('stop', 2), '4', 'r')
    assert (back.tokens.tolist(), back.logprobs.tolist()) == (answer().tokens.tolist(), answer().logprobs.tolist())
    assert (back.cached_tokens, back.latency_s) == (1, 0.42)
    wanted = answer().column(SAMPLING_LOGPROBS) if call.columns else answer().logprobs
    assert back.column(SAMPLING_LOGPROBS).tolist() == wanted.tolist()


@pytest.mark.parametrize('n', [1, 2])
@pytest.mark.parametrize('more', [{}, {'return_text_in_logprobs': True, 'sampling_logprobs_mode': 'selected'}])
def test_an_event_says_what_a_reply_would_say_then(n, more):
    call = sglang.parse(WANTED | {'sampling_params': {'n': n}} | more)
    growing, texts = Answer('r', PROMPT, 0, version='4'), ['a"', '\\é', '', '🙂\n']
    for i, text in enumerate(texts):
        cut = {SAMPLING_LOGPROBS.name: np.full(1, -0.5 * i, np.float32)}
        growing.add(Piece(np.array([i], np.int32), np.full(1, -i / 3, np.float32), str(i // 2), cut, text))
        event = parse_event(sglang.render_event(call, growing, growing.pieces[-1], INFO).decode().strip())
        whole = sglang.render(dataclasses.replace(call, n=1), [growing], INFO)
        assert event == (whole if n == 1 else whole | {'index': 0})


def test_a_stream_renders_each_token_once_and_joins_its_pieces():
    call, named = sglang.parse(WANTED | {'return_text_in_logprobs': True}), []
    info = dataclasses.replace(INFO, token_text=lambda token: named.append(token) or 'x')
    growing, n = Answer('r', PROMPT), 500
    for i in range(n):
        piece = Piece(np.array([100 + i], np.int32), np.zeros(1, np.float32), str(i // 300), text='x')
        growing.add(piece)
        sglang.render_event(call, growing, piece, info)
    assert [token for token in named if token >= 100] == growing.tokens.tolist()  # below is the prompt
    assert growing.n_tokens == n
    assert growing.spans == [Span('0', 0, 300), Span('1', 300, 500)]
    assert growing.text == 'x' * n
    assert len(growing.pieces) < 20


def test_a_reply_without_spans_has_a_piece_without_version():
    call = sglang.parse(WANTED)
    reply = sglang.render(call, [answer()], INFO)
    del reply['meta_info']['weight_versions'], reply['meta_info']['weight_version']
    (back,) = sglang.parse_reply(reply, call)
    assert (back.spans, back.version) == ([Span('', 0, 5)], '')


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'completion_tokens': 4}, 'output_token_logprobs in the meta_info of the server has 5 entries for'),
        ({'output_token_logprobs': None}, 'output_token_logprobs'),
        ({'output_token_logprobs': [[-0.5, 21, None]] * 4 + [[float('nan'), 2, None]]}, 'has the log-prob nan'),
        ({'output_token_logprobs': [[-0.5, 21, None]] * 4 + [[-9999.0, 2, None]]}, 'has the log-prob -9999.0'),
        ({'output_token_logprobs': [[-0.5, 21, None]] * 4 + [[0.5, 2, None]]}, 'has the log-prob 0.5'),
        ({'output_token_logprobs': [[-0.5, 21, None]] * 4 + [[None, 2, None]]}, 'has the log-prob None'),
        ({'output_token_logprobs': [[-0.5, 21, None]] * 4 + [[-(10**400), 2, None]]}, 'has the log-prob -1000'),
        ({'output_token_logprobs': [[-0.5, 21, None]] * 4 + [[-0.5, 32, None]]}, 'has the token 32'),
        ({'output_token_logprobs': [[-0.5, 21, None]] * 4 + [[]]}, 'has the token -1'),
        ({'weight_versions': [{'version': '3', 'start': 0, 'end': 4}]}, 'spans that do not cover 5 tokens'),
        ({'weight_versions': [{'version': '3', 'start': 1, 'end': 5}]}, 'spans that do not cover 5 tokens'),
        ({'weight_versions': [{'version': '3', 'start': 0, 'end': 6}]}, 'spans that do not cover 5 tokens'),
        ({'weight_versions': [{'version': 3, 'start': 0, 'end': 5}]}, 'has the span'),
        ({'finish_reason': {'type': 'other'}}, 'finish_reason'),
    ],
)
def test_a_reply_that_can_not_be_trusted_is_refused(changes, message):
    call = sglang.parse(WANTED)
    reply = sglang.render(call, [answer()], INFO)
    reply['meta_info'] |= changes
    with pytest.raises(ReplyError, match=message):
        sglang.parse_reply(reply, call, vocab_size=32)


def test_what_is_only_reported_may_be_missing_or_wrong():
    call = sglang.parse(WANTED)
    reply = sglang.render(call, [answer()], INFO)
    reply['meta_info'] |= {'id': None, 'cached_tokens': None, 'e2e_latency': 'x', 'weight_version': None}
    (back,) = sglang.parse_reply(reply, call)
    assert (back.request_id, back.cached_tokens, back.latency_s, back.version) == ('', 0, 0, '')


@pytest.mark.parametrize('reply', [None, {}, {'meta_info': []}, 'text', [3]])
def test_a_reply_of_another_form_is_refused(reply):
    with pytest.raises(ReplyError, match='no JSON object'):
        sglang.parse_reply(reply, sglang.parse(WANTED))
