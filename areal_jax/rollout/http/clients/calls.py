"""Makes the call that asks a server for the rest of a request's answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from areal_jax.columns import of_request
from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.rollout.http.wire.column_form import ColumnForm
from areal_jax.rollout.http.wire.exchange import Call, CallSampling
from areal_jax.rollout.running_request import GrowingAnswer
from areal_jax.types import GenerationRequest, concatenate


class ServerRequest(GrowingAnswer):
    """A request on a server; if the rest of the answer is lost, raises RequestFailedError after its segments."""

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str):
        super().__init__(request, clock, engine)
        self.wire_id = ''  # of the call under way
        self.versions: list[int] = []  # of the weights in use during the call, in order
        self.vain_calls = 0  # in a row that the server or another client aborted before their first token


NO_FORMS: Mapping[str, ColumnForm] = {}
_SEED_MASK = 2**31 - 1  # largest seed that every server takes


def make_call(
    request: GenerationRequest,
    generated: np.ndarray,
    wire_id: str,
    *,
    seeds: bool,
    streams: bool,
    forms: Mapping[str, ColumnForm] = NO_FORMS,
) -> Call:
    """Makes the call for the rest of the answer; `generated` int32 [n] is the answer so far, its prefix included.

    The seed depends on the request and the position: with the request alone, the rest of an answer would be drawn with
    the noise of its beginning. `forms` are of the requested columns of the model; they need a reply that is not
    streamed, because most servers have no columns in their events.
    """
    sampling = request.sampling
    parameters = CallSampling(
        max_new_tokens=sampling.max_new_tokens - len(generated),
        temperature=sampling.temperature,
        stop_tokens=sampling.stop_tokens,
        ignore_eos=True,
        seed=_seed(f'{request.request_id}/{len(generated)}') if seeds else None,
        skip_special_tokens=False,
    )
    prompt = concatenate([request.prompt_tokens, generated], np.int32)
    return Call(
        prompts=(prompt,),
        prompt_field='prompt',
        sampling=(parameters,),
        request_ids=(wire_id,),
        stream=streams and not forms,
        logprobs=True,
        columns=tuple(forms),
        forms=forms,
    )


def make_own_call(
    request: GenerationRequest, generated: np.ndarray, wire_id: str, forms: Mapping[str, ColumnForm] = NO_FORMS
) -> Call:
    """Makes the call for a server of this project, which uses the request's noise of the run at every position.

    Columns of the model include the prompt's entries in the first call for an answer only.
    """
    sampling, prompt = request.sampling, concatenate([request.prompt_tokens, generated], np.int32)
    parameters = CallSampling(
        max_new_tokens=sampling.max_new_tokens - len(generated),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        stop_tokens=sampling.stop_tokens,
        ignore_eos=True,
        seed=request.seed,
        skip_special_tokens=False,
    )
    return Call(
        prompts=(prompt,),
        prompt_field='prompt',
        sampling=(parameters,),
        request_ids=(wire_id,),
        stream=True,
        logprobs=True,
        columns=(*(one.name for one in of_request(sampling) if one.published and one.shape is not None), *forms),
        first_row=len(prompt) - 1 if forms and len(generated) else 0,
        forms=forms,
        draw=request.draw,
        sample=request.noise_sample,
    )


def require_fit(request: GenerationRequest, engine: str, vocab_size: int, context_tokens: int) -> None:
    """Raises UserError for a request that would harm the server or be truncated silently."""
    prompt, sampling = request.prompt_tokens, request.sampling
    asked = len(prompt) + sampling.max_new_tokens
    if not len(prompt) or asked > context_tokens:
        raise UserError(
            f'draw {request.draw}: a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones '
            f'(rollout.max_new_tokens) do not fit the context of {engine}, {context_tokens} tokens: start the server '
            'with a longer one or shorten the prompt'
        )
    outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
    if len(outside):
        raise UserError(
            f'draw {request.draw}: the prompt has the token {outside[0]}, and {engine} serves a vocabulary of '
            f'{vocab_size}: use the tokenizer of its model'
        )


def require_plain(request: GenerationRequest, engine: str) -> None:
    """Raises UserError for a request that would lack its log-probs."""
    if request.sampling.changes_softmax or request.sampling.stop_strings:
        raise UserError(
            f'{engine} has no log-probs of a softmax that is cut, penalised or biased, and watches no stop strings '
            f'(rollout.top_k, rollout.top_p and the like): switch them off or use rollout.server=own'
        )


def require_own(request: GenerationRequest, engine: str) -> None:
    """Raises UserError for parameters that depend on the answer so far, which is a part of the call's prompt."""
    if request.sampling.adjusts or request.sampling.stop_strings:
        raise UserError(
            f'{engine} continues answers as a part of their prompts, where penalties, biases, min_new_tokens and stop '
            'strings would count wrong: switch them off'
        )


def make_probe() -> Call:
    """Makes a call for one greedy token, whatever it is, after a prompt that every vocabulary has."""
    return Call(
        prompts=(np.zeros(1, np.int32),),
        prompt_field='prompt',
        sampling=(CallSampling(max_new_tokens=1, temperature=0.0, ignore_eos=True, skip_special_tokens=False),),
        request_ids=('',),
        logprobs=True,
    )


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) & _SEED_MASK
