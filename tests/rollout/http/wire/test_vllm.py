"""vLLM's /inference/v1/generate: every field of the request, every field of the reply, both ways round."""

import dataclasses
import json

import pytest

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Answer, CallSampling, Finish, ReplyError, RequestError
from tests.rollout.http.wire.calls import INFO, PROMPT, answer, stream

SAMPLING = {
    'max_tokens': 64, 'temperature': 1.0, 'top_p': 1.0, 'top_k': 0, 'min_p': 0.0, 'stop_token_ids': [2], 'logprobs': 1,
    'skip_special_tokens': False, 'seed': None, 'ignore_eos': False, 'min_tokens': 0, 'detokenize': False,
    'routed_experts_prompt_start': 0,
}  # fmt: skip
BODY = {
    'model': 'm', 'token_ids': PROMPT.tolist(), 'request_id': 'a', 'cache_salt': '4', 'priority': 0, 'stream': False,
    'return_token_ids': False, 'output_mode': 'tokens', 'sampling_params': SAMPLING,
}  # fmt: skip


def with_sampling(**changes):
    return BODY | {'sampling_params': SAMPLING | changes}


def test_every_field_of_the_request():
    call = vllm.parse(BODY)
    assert (call.model, call.prompts[0].tolist(), call.request_ids, call.cache_salt) == ('m', [11, 12, 13], ('a',), '4')
    assert (call.n, call.stream, call.logprobs, call.priority) == (1, False, True, 0)
    assert call.sampling == (CallSampling(64, stop_tokens=(2,), skip_special_tokens=False),)


def test_a_limit_that_is_left_out_is_the_rest_of_the_context():
    call = vllm.parse({'token_ids': [1], 'sampling_params': {}})
    assert (call.sampling, call.logprobs) == ((CallSampling(None),), False)
    assert vllm.parse(with_sampling(n=2)).request_ids == ('a_0', 'a_1')


@pytest.mark.parametrize(
    ('body', 'field'),
    [
        (BODY | {'token_ids': []}, 'token_ids'),
        (BODY | {'token_ids': None}, 'token_ids'),
        (BODY | {'token_ids': [1, -1]}, 'token_ids'),
        (BODY | {'token_ids': [[1]]}, 'token_ids'),
        (BODY | {'cache_salt': ''}, 'cache_salt'),
        (BODY | {'cache_salt': 'x' * 1025}, 'cache_salt'),
        (BODY | {'cache_salt': 4}, 'cache_salt'),
        (BODY | {'features': {'mm_hashes': {}}}, 'features'),
        (BODY | {'content_parts': [{'type': 'image_url'}]}, 'content_parts'),
        (BODY | {'kv_transfer_params': {'a': 1}}, 'kv_transfer_params'),
        (BODY | {'ec_transfer_params': {'a': 1}}, 'ec_transfer_params'),
        (BODY | {'tools': []}, 'tools'),
        (BODY | {'output_mode': 'text'}, 'output_mode'),
        (BODY | {'stream': 1}, 'stream'),
        (BODY | {'stream_options': {'chunk': 1}}, 'stream_options.chunk'),
        (BODY | {'priority': 1.5}, 'priority'),
        (BODY | {'sampling_params': []}, 'sampling_params'),
        (with_sampling(max_tokens=0), 'sampling_params.max_tokens'),
        (with_sampling(logprobs=21), 'sampling_params.logprobs'),
        (with_sampling(prompt_logprobs=21), 'sampling_params.prompt_logprobs'),
        (with_sampling(flat_logprobs=True), 'sampling_params.flat_logprobs'),
        (with_sampling(extra_args={'a': 1}), 'sampling_params.extra_args'),
        (with_sampling(max_new_tokens=4), 'sampling_params.max_new_tokens'),
        (with_sampling(temperature=-1), 'sampling_params.temperature'),
    ],
)
def test_what_is_not_served_is_refused_by_name(body, field):
    with pytest.raises(RequestError) as error:
        vllm.parse(body)
    assert error.value.field == field
    assert str(error.value).startswith(f'{field}=')


def test_the_reply_has_every_field():
    def entry(token, logprob):
        return {'token_id': token, 'token': f'token_id:{token}', 'logprob': logprob, 'rank': None, 'top_logprobs': []}

    assert vllm.render(vllm.parse(BODY), [answer('a')], INFO) == {
        'request_id': 'a', 'model': 'm', 'created': 1795234194, 'output_mode': 'tokens', 'prompt_token_ids': None,
        'usage': {'prompt_tokens': 3, 'completion_tokens': 5, 'total_tokens': 8},
        'choices': [{
            'index': 0, 'finish_reason': 'stop', 'stop_reason': 2, 'token_ids': [21, 22, 23, 24, 2],
            'logprobs': {'content': [
                entry(21, -0.5), entry(22, -1.25), entry(23, -2.0), entry(24, -0.125), entry(2, -0.75),
            ]},
            'weight_versions': [{'version': '3', 'start': 0, 'end': 2}, {'version': '4', 'start': 2, 'end': 5}],
            'routed_experts': None, 'sampling_mask': None,
        }],
    }  # fmt: skip


def test_optional_parts_come_when_they_are_asked_for():
    body = with_sampling(logprobs=None) | {'return_token_ids': True, 'return_sampling_logprobs': True, 'model': None}
    reply = vllm.render(vllm.parse(body), [answer()], INFO)
    assert (reply['prompt_token_ids'], reply['model']) == ([11, 12, 13], 'served')
    assert reply['choices'][0]['logprobs'] is None
    assert reply['choices'][0]['sampling_logprobs'] == [-0.25, -0.5, -2.0, -0.125, -0.75]


def test_the_reason_of_a_stop_is_one_that_was_asked_for():
    """The model's own EOS is a stop without a reason."""
    assert vllm.stop_reason(vllm.parse(with_sampling(stop_token_ids=[])), answer()) is None
    assert vllm.stop_reason(vllm.parse(with_sampling(stop=['x'])), answer(finish=Finish('stop', 'x'))) == 'x'
    assert vllm.stop_reason(vllm.parse(BODY), answer(finish=Finish('length'))) is None


def test_a_stream_has_what_each_event_adds():
    body = BODY | {'stream': True, 'stream_options': {'include_usage': True}, 'return_token_ids': True}
    first, last, usage = stream(vllm, vllm.parse(body))
    assert (first['choices'][0]['token_ids'], last['choices'][0]['token_ids']) == ([21, 22], [23, 24, 2])
    assert first['choices'][0]['weight_versions'] == [{'version': '3', 'start': 0, 'end': 2}]
    assert len(last['choices'][0]['weight_versions']) == 2  # all of the answer
    assert [event['choices'][0]['finish_reason'] for event in (first, last)] == [None, 'stop']
    assert (first['prompt_token_ids'], 'prompt_token_ids' in last) == ([11, 12, 13], False)
    assert (usage['choices'], usage['usage']['completion_tokens']) == ([], 5)
    assert len(stream(vllm, vllm.parse(BODY))) == 2


def test_the_client_reads_events():
    call = vllm.parse(BODY | {'return_sampling_logprobs': True, 'stream': True})
    so_far, found = [0], []
    for event in stream(vllm, call):
        for delta in vllm.parse_event(event, call, so_far, 32):
            so_far[delta.index] += sum(len(piece.tokens) for piece in delta.pieces)
            found.append(delta)
    whole = Answer('a', PROMPT, pieces=[piece for delta in found for piece in delta.pieces], finish=found[-1].finish)
    assert (whole.spans, whole.finish) == (answer().spans, Finish('stop', 2))
    assert whole.tokens.tolist() == answer().tokens.tolist()
    assert whole.column(SAMPLING_LOGPROBS).tolist() == answer().column(SAMPLING_LOGPROBS).tolist()


def test_an_event_with_an_error_is_refused():
    with pytest.raises(ReplyError, match='error in the event of the server has'):
        vllm.parse_event(vllm.render_error('broken', 500), vllm.parse(BODY), [0])


def test_refusals_have_the_form_of_the_dialect():
    assert vllm.render_error('bad', 400, 'token_ids') == {
        'error': {'message': 'bad', 'type': 'BadRequestError', 'param': 'token_ids', 'code': 400}
    }
    assert vllm.render_error('down', 503)['error']['type'] == 'InternalServerError'


@pytest.mark.parametrize('changes', [{}, {'n': 2}, {'max_tokens': None, 'logprobs': None}, {'stop': ['x']}])
def test_the_server_reads_what_the_client_writes(changes):
    given = vllm.parse(with_sampling(**changes) | {'priority': 3, 'return_sampling_logprobs': True, 'stream': True})
    back = vllm.parse(json.loads(json.dumps(vllm.render_request(given))))
    assert back.prompts[0].tolist() == given.prompts[0].tolist()
    assert dataclasses.replace(back, prompts=given.prompts) == given


@pytest.mark.parametrize('body', [BODY, BODY | {'return_sampling_logprobs': True}])
def test_the_client_reads_what_the_server_writes(body):
    call = vllm.parse(body)
    (back,) = vllm.parse_reply(json.loads(json.dumps(vllm.render(call, [answer('a')], INFO))), call, vocab_size=32)
    assert (back.spans, back.finish, back.version, back.request_id) == (answer().spans, Finish('stop', 2), '4', 'a')
    assert (back.tokens.tolist(), back.logprobs.tolist()) == (answer().tokens.tolist(), answer().logprobs.tolist())
    wanted = answer().column(SAMPLING_LOGPROBS) if call.columns else answer().logprobs
    assert back.column(SAMPLING_LOGPROBS).tolist() == wanted.tolist()


@pytest.mark.parametrize('name', ['token', 'token_id'])
def test_either_name_of_the_token_is_enough(name):
    call = vllm.parse(BODY)
    reply = vllm.render(call, [answer()], INFO)
    for entry in reply['choices'][0]['logprobs']['content']:
        del entry[name]
    assert vllm.parse_reply(reply, call)[0].n_tokens == 5


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (lambda c: c['logprobs']['content'].pop(), 'content in the logprobs'),
        (lambda c: c['logprobs']['content'][0].update(token_id=22), 'which is not the sampled token 21'),
        (lambda c: c['logprobs']['content'][0].update(token='token_id:22'), 'which is not the sampled token 21'),
        (lambda c: c['logprobs']['content'][0].update(logprob=-9999.0), 'the log-prob -9999.0'),
        (lambda c: c['logprobs']['content'][0].update(logprob=float('-inf')), 'the log-prob -inf'),
        (lambda c: c.update(logprobs=None), 'logprobs of the server is no JSON object'),
        (lambda c: c.update(token_ids=5), 'token_ids'),
        (lambda c: c.update(finish_reason='error'), 'finish_reason'),
        (lambda c: c.update(index=1), 'index'),
        (lambda c: c.update(weight_versions=[{'version': '3', 'start': 0, 'end': 2}]), 'do not cover 5 tokens'),
    ],
)
def test_a_reply_that_can_not_be_trusted_is_refused(spoil, message):
    call = vllm.parse(BODY)
    reply = vllm.render(call, [answer()], INFO)
    spoil(reply['choices'][0])
    with pytest.raises(ReplyError, match=message):
        vllm.parse_reply(reply, call, vocab_size=32)


def test_an_abort_keeps_its_tokens_or_has_none():
    call = vllm.parse(BODY)
    (cut,) = vllm.parse_reply(vllm.render(call, [answer(finish=Finish('abort'))], INFO), call)
    assert (cut.n_tokens, cut.finish) == (5, Finish('abort'))
    queued = Answer('a', PROMPT, finish=Finish('abort'))
    assert vllm.parse_reply(vllm.render(call, [queued], INFO), call)[0].n_tokens == 0
