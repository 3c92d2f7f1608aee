"""The request that an engine in another process answers before it gets work, and what its answer must be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from areal_jax.rollout.servers.member import Member, ProbeSettings, RemoteError, find_fault
from areal_jax.types import GenerationRequest, SamplingParams, Segment, concatenate

PROBE_DRAW = 2**31 - 1  # no draw of a prompt stream is that high

# version, prompt tokens int32 [P], answer tokens int32 [A] -> the learner's log-probs of the answer, float32 [A]; None:
# the learner does not have that version any more
Score = Callable[[int, np.ndarray, np.ndarray], Awaitable[np.ndarray | None]]


class ProbeError(RemoteError):
    """An engine answered the probe, and not as it should."""


def make_probe(settings: ProbeSettings, number: int) -> GenerationRequest:
    """`number` tells the probes of one engine apart."""
    sampling = SamplingParams(settings.new_tokens, temperature=settings.temperature, top_k=0, top_p=1.0, stop_tokens=())
    return GenerationRequest(PROBE_DRAW, number, 0, settings.prompt_tokens, sampling)


async def answer_probe(member: Member, request: GenerationRequest, version: int) -> list[Segment]:
    """The answer of an engine that holds the version; raises ProbeError for one that is not sound in itself."""
    generation, segments, room = member.engine.generate(request), [], request.sampling.max_new_tokens
    async for segment in generation:
        if fault := find_fault(segment, version, version, room):
            raise ProbeError(fault)
        segments.append(segment)
        room -= len(segment.tokens)
    if room or generation.finish_reason != 'length':
        raise ProbeError(f'an answer with {room} tokens left and the reason {generation.finish_reason!r}')
    return segments


def compare(segments: list[Segment], reference: np.ndarray) -> tuple[float, float]:
    """The largest and the mean difference between the log-probs of an answer and the learner's, float32 [A]."""
    differences = np.abs(concatenate([s.behavior_logprobs for s in segments], np.float32) - reference)
    return float(differences.max()), float(differences.mean())
