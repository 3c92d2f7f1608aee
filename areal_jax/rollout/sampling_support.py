"""Which sampling parameters an engine can decode with; stream.py refuses a request with others before it is queued."""

from __future__ import annotations

import dataclasses

from areal_jax.errors import UserError
from areal_jax.types import GenerationRequest, SamplingParams

# The least and most of a parameter. In between float32 logits stay finite.
_RANGES = {
    'temperature': (1e-5, 1e5),
    'top_p': (0.0, 1.0),
    'min_p': (0.0, 1.0),
    'repetition_penalty': (0.01, 100.0),
    'frequency_penalty': (-2.0, 2.0),
    'presence_penalty': (-2.0, 2.0),
    'logit_scale': (1e-5, 1e5),
}
_MOST_BIAS = 100.0


class SamplingError(UserError, ValueError):
    """A sampling parameter that no engine, or not this one, can decode with."""


@dataclasses.dataclass(frozen=True)
class SamplingSupport:
    """What the programs of a backend take besides temperature and stop tokens. Producer: the backend."""

    vocab_size: int
    cuts: bool  # top_k, top_p and min_p
    adjusts: bool  # what SamplingParams.adjusts says
    stop_tokens: int  # most of a request
    biased_tokens: int  # most of a request

    def check(self, request: GenerationRequest) -> None:
        """Raises SamplingError for a parameter that is out of its range, or that the programs cannot decode with."""
        if problem := _out_of_range(request.sampling):
            raise SamplingError(f'request {request.request_id}: {problem}')
        self.check_programs(request)

    def check_programs(self, request: GenerationRequest) -> None:
        """The second half of `check`, cheap enough for every row of every dispatch."""
        if problem := self._beyond_programs(request.sampling):
            raise SamplingError(f'request {request.request_id}: {problem}')

    def _beyond_programs(self, params: SamplingParams) -> str:
        if len(params.stop_tokens) > self.stop_tokens:
            return f'{len(params.stop_tokens)} stop tokens, but a row holds {self.stop_tokens}; use fewer'
        if params.cuts and not self.cuts:
            return (
                f'top_k={params.top_k}, top_p={params.top_p}, min_p={params.min_p}, but the programs were built '
                'without; build the backend with filtered=True'
            )
        if params.adjusts and not self.adjusts:
            return (
                f'{_name_adjustments(params)}, but the programs were built without; build the backend with '
                'adjusted=True'
            )
        if len(params.logit_bias) > self.biased_tokens:
            return f'logit_bias has {len(params.logit_bias)} tokens, but a row holds {self.biased_tokens}; use fewer'
        for token, _ in params.logit_bias:
            if not 0 <= token < self.vocab_size:
                return f'logit_bias has token {token}; use tokens from 0 to {self.vocab_size - 1}'
        return ''


def _out_of_range(params: SamplingParams) -> str:
    """What is wrong with parameters that no engine decodes with; '' = nothing."""
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if not (least <= value <= most or (name == 'temperature' and value == 0)):
            return f'{name}={value} must lie between {least:g} and {most:g}' + ', or be 0' * (name == 'temperature')
    if params.top_k < 0:
        return f'top_k={params.top_k} must not be negative; use 0 to turn it off'
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        return f'min_new_tokens={params.min_new_tokens} must lie between 0 and max_new_tokens={params.max_new_tokens}'
    for token, bias in params.logit_bias:
        if not abs(bias) <= _MOST_BIAS:  # NaN too
            return f'logit_bias of token {token} is {bias}; use values from {-_MOST_BIAS:g} to {_MOST_BIAS:g}'
    tokens = [token for token, _ in params.logit_bias]
    if len(set(tokens)) < len(tokens):
        return f'logit_bias={params.logit_bias} names a token twice; add the values up'
    if '' in params.stop_strings:
        return f'stop_strings={params.stop_strings} has an empty string; leave it out'
    return ''


def _name_adjustments(params: SamplingParams) -> str:
    """'min_new_tokens=3, presence_penalty=0.5': those that differ from their defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(params)}
    names = (
        'min_new_tokens',
        'repetition_penalty',
        'frequency_penalty',
        'presence_penalty',
        'logit_bias',
        'logit_scale',
    )
    changed = [f'{name}={getattr(params, name)}' for name in names if getattr(params, name) != fields[name]]
    return ', '.join(changed)
