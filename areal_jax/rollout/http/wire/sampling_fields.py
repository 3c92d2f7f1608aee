"""Sampling parameters on the wire: the dialects mean the same by them and differ in a few names."""

from __future__ import annotations

import dataclasses

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import CallSampling
from areal_jax.rollout.http.wire.request_fields import Fields

_LEAST_TEMPERATURE = 1e-5  # below it logits divided by it leave float32
_LARGEST_TEMPERATURE = 1e4
_LARGEST_PENALTY = 2.0  # presence and frequency
_LARGEST_REPETITION = 10.0
_LARGEST_SEED = 2**63 - 1
# every token of an answer is held against all stop strings, so these bound what one request costs the others
_MOST_STOP_STRINGS, _STOP_CHARACTERS, _MOST_STOP_TOKENS = 64, 4096, 1024


@dataclasses.dataclass(frozen=True)
class Names:
    """How a dialect calls what others call differently."""

    min_new_tokens: str = 'min_tokens'
    seed: str = 'seed'
    keep_stop: str = 'include_stop_str_in_output'


OPENAI = Names()  # vLLM's too
SGLANG = Names('min_new_tokens', 'sampling_seed', 'no_stop_trim')


def read_sampling(fields: Fields, names: Names, max_new_tokens: int | None) -> CallSampling:
    """Takes every sampling parameter but the limit of new tokens, whose name and default are the dialect's."""
    bound = max_new_tokens or 2**31 - 1
    top_k = fields.take_integer('top_k', 0, least=-1)
    return CallSampling(
        max_new_tokens=max_new_tokens,
        min_new_tokens=fields.take_integer(names.min_new_tokens, 0, least=0, most=bound),
        temperature=_read_temperature(fields),
        top_k=max(top_k, 0),  # -1 is off too
        top_p=fields.take_number('top_p', 1.0, 0, 1, above=True),
        min_p=fields.take_number('min_p', 0.0, 0, 1),
        repetition_penalty=fields.take_number('repetition_penalty', 1.0, 0, _LARGEST_REPETITION, above=True),
        presence_penalty=fields.take_number('presence_penalty', 0.0, -_LARGEST_PENALTY, _LARGEST_PENALTY),
        frequency_penalty=fields.take_number('frequency_penalty', 0.0, -_LARGEST_PENALTY, _LARGEST_PENALTY),
        logit_bias=fields.take_bias('logit_bias'),
        stop_tokens=fields.take_token_ids('stop_token_ids', _MOST_STOP_TOKENS),
        stop_strings=fields.take_texts('stop', _MOST_STOP_STRINGS, _STOP_CHARACTERS),
        ignore_eos=fields.take_flag('ignore_eos'),
        seed=fields.take_optional_integer(names.seed, least=0, most=_LARGEST_SEED),
        skip_special_tokens=fields.take_flag('skip_special_tokens', True),
        keep_stop=fields.take_flag(names.keep_stop),
    )


def render_sampling(sampling: CallSampling, names: Names) -> JsonObject:
    """What a client sends, but for the limit of new tokens; older servers do not know all, so defaults are left out."""
    found: JsonObject = {
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'top_k': sampling.top_k or -1,
        'ignore_eos': sampling.ignore_eos,
        'skip_special_tokens': sampling.skip_special_tokens,
    }
    named = {
        names.min_new_tokens: (sampling.min_new_tokens, 0),
        'min_p': (sampling.min_p, 0.0),
        'repetition_penalty': (sampling.repetition_penalty, 1.0),
        'presence_penalty': (sampling.presence_penalty, 0.0),
        'frequency_penalty': (sampling.frequency_penalty, 0.0),
        'logit_bias': ({str(token): bias for token, bias in sampling.logit_bias}, {}),
        'stop_token_ids': (list(sampling.stop_tokens), []),
        'stop': (list(sampling.stop_strings), []),
        names.seed: (sampling.seed, None),
        names.keep_stop: (sampling.keep_stop, False),
    }
    return found | {name: value for name, (value, default) in named.items() if value != default}


def _read_temperature(fields: Fields) -> float:
    temperature = fields.take_number('temperature', 1.0, 0, _LARGEST_TEMPERATURE)
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise fields.refuse('temperature', temperature, f'must be 0, which is greedy, or at least {_LEAST_TEMPERATURE}')
    return temperature
