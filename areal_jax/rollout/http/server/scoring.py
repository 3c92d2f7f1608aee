"""Scoring for calls: the prompts of the answers, and the alternatives of generated tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from areal_jax.rollout.http.server.bridge import Bridge, find_group
from areal_jax.rollout.http.server.limits import FAILED
from areal_jax.rollout.http.wire.exchange import Answer, Call, Finish, RequestError
from areal_jax.rollout.scoring import Scored, ScoringRequest
from areal_jax.rollout.stream import LogprobError


def require_scorable(call: Call, most_tokens: int) -> None:
    """Raises RequestError if the prompts to be scored have more tokens than `most_tokens`, this server's limit."""
    indices = range(0, call.n_answers, call.n)
    scored = sum(len(call.prompts[i // call.n]) - call.scored_from(i) for i in indices)
    if scored > most_tokens:
        raise RequestError(
            call.prompt_field,
            f'{call.prompt_field}: log-probs of {scored} prompt tokens in one request, and this '
            f'server computes {most_tokens} at most: send fewer prompts at once',
        )


async def score_prompts(bridge: Bridge, call: Call, answers: Sequence[Answer]) -> None:
    """Sets the scores of all prompts whose log-probs are wanted, before anything is generated."""
    await _score(bridge, call, [answer for answer in answers if answer.index % call.n == 0], with_answers=False)
    _share_prompts(call, answers)


async def score_answers(bridge: Bridge, call: Call, answers: Sequence[Answer]) -> None:
    """Sets the scores of prompts and the alternatives of answers, when the answers are complete.

    Alternatives come from a pass over prompt and answer, which is exact under the weights that drew the answer. If the
    weights changed since the answer began, it gets none.
    """
    if call.alternatives:
        await _score(bridge, call, answers, with_answers=True)
        _share_prompts(call, answers)
    else:
        await score_prompts(bridge, call, answers)


def _share_prompts(call: Call, answers: Sequence[Answer]) -> None:
    """Copies the prompt scores of the first answer to all answers of the same prompt."""
    for answer in answers:
        first = answers[answer.index - answer.index % call.n]
        answer.prompt_scores, answer.scored_version = first.prompt_scores, first.scored_version


async def _score(bridge: Bridge, call: Call, answers: Sequence[Answer], *, with_answers: bool) -> None:
    wanted = [one for one in answers if _wants(call, one, with_answers)]
    requests = [_describe(call, answer, with_answers) for answer in wanted]
    try:
        scored = await asyncio.gather(*(_ask(bridge, request) for request in requests))
    except LogprobError as error:
        bridge.withdraw_scoring(requests)
        raise RequestError(call.prompt_field, str(error), FAILED) from error
    except BaseException:
        bridge.withdraw_scoring(requests)
        raise
    for answer, found in zip(wanted, scored, strict=True):
        if found is None:
            if not answer.n_tokens:
                answer.finish = Finish('abort', None, 'Aborted')
            continue
        _note(call, answer, found)


def _wants(call: Call, answer: Answer, with_answers: bool) -> bool:
    prompt = answer.index // call.n
    listed = call.scored_from(answer.index) < len(answer.prompt_tokens) or call.prompt_logprobs is not None
    scores_prompt = listed or call.sampling[prompt].max_new_tokens == 0
    return bool(call.prompt_starts and scores_prompt and answer.index % call.n == 0) or (
        with_answers and answer.n_tokens > 0
    )


async def _ask(bridge: Bridge, request: ScoringRequest) -> Scored | None:
    return await bridge.act('score', lambda service: service.score(request))


def _describe(call: Call, answer: Answer, with_answers: bool) -> ScoringRequest:
    """Makes the scoring request: prompt tokens at temperature 1, generated ones at the request's temperature."""
    prompt = len(answer.prompt_tokens)
    first = call.scored_from(answer.index) if answer.index % call.n == 0 else prompt
    generated = answer.tokens if with_answers else np.zeros(0, np.int32)
    temperatures = np.ones(prompt + len(generated) - first, np.float32)
    temperatures[prompt - first :] = call.sampling[answer.index // call.n].temperature
    alternatives = max(call.prompt_alternatives if first < prompt else 0, call.alternatives)
    tokens = np.concatenate([answer.prompt_tokens, generated])
    return ScoringRequest(
        answer.request_id, tokens, first, temperatures, alternatives, find_group(call, answer.request_id)
    )


def _note(call: Call, answer: Answer, found: Scored) -> None:
    prompt = len(answer.prompt_tokens)
    first = call.scored_from(answer.index) if answer.index % call.n == 0 else prompt
    scores = found.scores
    if call.prompt_starts and answer.index % call.n == 0:
        answer.prompt_scores, answer.scored_version = scores.part(0, prompt - first), found.version
    if len(scores.logprobs) > prompt - first and found.number == answer.began:
        answer.alternatives = scores.part(prompt - first, len(scores.logprobs))
    if not answer.n_tokens:
        answer.version = found.version
