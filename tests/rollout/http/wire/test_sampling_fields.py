"""Every sampling parameter is read under its name in the dialect, bounded, and written back the same."""

import dataclasses

import pydantic
import pytest

from areal_jax.rollout.http.wire import bodies, sglang, vllm
from areal_jax.rollout.http.wire.bodies import render_sampling
from areal_jax.rollout.http.wire.exchange import CallSampling, RequestError

OPENAI, SGLANG = vllm.Parameters, sglang.Parameters

FULL = CallSampling(
    max_new_tokens=64, min_new_tokens=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
    presence_penalty=0.2, frequency_penalty=-0.3, logit_bias=((3, -2.0), (7, 1.5)), stop_tokens=(2, 9),
    stop_strings=('\n\n', 'END'), ignore_eos=True, seed=42, skip_special_tokens=False, keep_stop=True,
)  # fmt: skip


def read(body, kind=OPENAI, limit=64):
    request = pydantic.create_model('Request', __base__=bodies.Body, sampling_params=(kind, ...))
    found, ignored = bodies.read(request, {'sampling_params': body})
    assert not ignored
    return found.sampling_params.make(limit, 'sampling_params.')


@pytest.mark.parametrize('names', [OPENAI, SGLANG])
@pytest.mark.parametrize('sampling', [FULL, CallSampling(64), dataclasses.replace(FULL, top_k=0, temperature=0.0)])
def test_reading_gives_what_was_written(names, sampling):
    assert read(render_sampling(sampling, names), names) == sampling


def test_every_parameter_is_written():
    changed = {
        f.name for f in dataclasses.fields(CallSampling) if getattr(FULL, f.name) != getattr(CallSampling(0), f.name)
    }
    assert changed == {f.name for f in dataclasses.fields(CallSampling)}
    assert len(render_sampling(FULL, SGLANG)) == len(changed) - 1  # the limit is written by the dialect


def test_a_default_that_old_servers_do_not_know_is_left_out():
    assert set(render_sampling(CallSampling(1), SGLANG)) == {
        'temperature', 'top_p', 'top_k', 'ignore_eos', 'skip_special_tokens',
    }  # fmt: skip


def test_names_differ_between_dialects():
    body = {'min_new_tokens': 1, 'sampling_seed': 5, 'no_stop_trim': True}
    assert read(body, SGLANG) == CallSampling(64, min_new_tokens=1, seed=5, keep_stop=True)
    assert read({'min_tokens': 1, 'seed': 5, 'include_stop_str_in_output': True}) == read(body, SGLANG)
    with pytest.raises(RequestError, match=r'^sampling_params\.sampling_seed=5 is an unknown field'):
        read({'sampling_seed': 5})


def test_off_has_two_spellings():
    assert read({'top_k': -1}) == read({'top_k': 0}) == read({}) == CallSampling(64)


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('temperature', -1), ('temperature', 1e-7), ('temperature', 1e5), ('top_p', 0), ('top_p', 1.5), ('top_k', -2),
        ('top_k', 1.5), ('min_p', -0.1), ('min_p', 2), ('min_tokens', -1), ('min_tokens', 65),
        ('repetition_penalty', 0), ('presence_penalty', 3), ('frequency_penalty', -3), ('logit_bias', {'x': 1}),
        ('stop', ['']), ('stop', 5), ('stop_token_ids', [-2]), ('stop_token_ids', 2), ('ignore_eos', 'yes'),
        ('seed', -1), ('seed', 1.5), ('skip_special_tokens', 0), ('include_stop_str_in_output', 1),
    ],
)  # fmt: skip
def test_what_can_not_be_sampled_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as error:
        read({field: value})
    assert error.value.field.startswith(f'sampling_params.{field}')
