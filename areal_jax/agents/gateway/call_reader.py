"""Requests of programs: the dialects of the server, sampled as the run says."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import cast

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import chat, messages, responses
from areal_jax.rollout.http.wire.exchange import ASKED, Call, Message, RequestError
from areal_jax.rollout.http.wire.openai import Required, describe_wishes, require_granted
from areal_jax.types import SamplingParams

DIALECTS: Mapping[str, ModuleType] = {
    '/v1/chat/completions': chat,
    '/v1/responses': responses,
    '/v1/messages': messages,
}
_LIMITS = ('max_tokens', 'max_completion_tokens', 'max_output_tokens')  # messages.py needs one
# what would sample another distribution, cut an answer elsewhere or score a prompt; the value that asks for nothing
_OVERRIDDEN: Mapping[str, object] = {
    'stop': [], 'stop_sequences': [], 'stop_token_ids': [], 'seed': None, 'logit_bias': {}, 'min_p': 0,
    'presence_penalty': 0, 'frequency_penalty': 0, 'repetition_penalty': 1, 'min_tokens': 0, 'ignore_eos': False,
    'top_logprobs': 0, 'prompt_logprobs': None, 'cache_salt': '', 'skip_special_tokens': True,
    'include_stop_str_in_output': False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AskedCall:
    """One request of a program."""

    call: Call  # for the reply
    messages: tuple[JsonObject, ...]  # as chat templates have them
    wish: str  # what the model is told besides; it is no part of the history that comes back
    digest: str  # of path and body: a retry has the same
    counts: Mapping[str, int]  # fields by what became of them: 'overridden/temperature', 'ignored/user'


def read_asked_call(path: str, body: object, sampling: SamplingParams, required: Required) -> AskedCall:
    """Raises RequestError for a body that is refused."""
    counts: collections.Counter[str] = collections.Counter()
    call = DIALECTS[path].parse(_override(body, sampling, counts))
    require_granted(call, required)
    if call.model_columns:
        asked = ASKED.format(call.model_columns[0])
        raise RequestError(asked, f'{asked}=True is not served to programs: the run has the routes, leave it out')
    counts.update(f'ignored/{field}' for field in call.ignored)
    (prompt,) = call.prompts
    if not isinstance(prompt, tuple):
        raise RequestError(call.prompt_field, f'{call.prompt_field}: an episode has no prompts of ids: send messages')
    turns = tuple(cast(Message, turn).describe() for turn in prompt)
    return AskedCall(call, turns, describe_wishes(call.wishes), _digest(path, body), counts)


def read_count(body: object) -> tuple[list[JsonObject], list[JsonObject]]:
    """The messages and tools of a request for the length of its prompt."""
    call = messages.parse_count(body)
    (prompt,) = call.prompts
    assert isinstance(prompt, tuple)
    return [turn.describe() for turn in prompt], [dict(tool) for tool in call.tools]


def _override(body: object, sampling: SamplingParams, counts: collections.Counter[str]) -> object:
    """The body without what the run decides; `counts` gets what asked for something else."""
    if not isinstance(body, Mapping):
        return body
    of_run = {'temperature': sampling.temperature, 'top_p': sampling.top_p, 'top_k': sampling.top_k or -1}
    neutral = {**_OVERRIDDEN, **of_run}
    given = {name: body[name] for name in (*neutral, *_LIMITS) if body.get(name) is not None}
    counts.update(f'overridden/{name}' for name, value in given.items() if value != neutral.get(name))
    return {name: value for name, value in body.items() if name not in neutral}


def _digest(path: str, body: object) -> str:
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()
