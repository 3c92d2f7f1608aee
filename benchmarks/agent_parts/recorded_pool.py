"""A pool that notes what its engine got and drew, beside what the episodes make of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from areal_jax.control.episode import Episode
from areal_jax.protocols import Generation, Generator
from areal_jax.types import NOT_GENERATED, GenerationRequest, Prompt, Segment, concatenate


@dataclasses.dataclass
class Drawn:
    """One request, and what came."""

    request: GenerationRequest
    segments: list[Segment] = dataclasses.field(default_factory=list)


class RecordedPool:
    """Implements protocols.Generator."""

    def __init__(self, pool: Generator):
        self._pool, self.drawn = pool, list[Drawn]()

    def generate(self, request: GenerationRequest, prefer: str = '') -> Generation:
        drawn = Drawn(request)
        self.drawn.append(drawn)
        return _RecordedGeneration(self._pool.generate(request, prefer), drawn)

    def cancel(self, request: GenerationRequest) -> None:
        self._pool.cancel(request)

    def cancel_all(self) -> None:
        self._pool.cancel_all()


class _RecordedGeneration:
    def __init__(self, generation: Generation, drawn: Drawn):
        self._generation, self._drawn = generation, drawn

    @property
    def finish_reason(self):
        return self._generation.finish_reason

    @property
    def engine(self) -> str:
        return self._generation.engine

    def __aiter__(self) -> _RecordedGeneration:
        return self

    async def __anext__(self) -> Segment:
        segment = await self._generation.__anext__()
        self._drawn.segments.append(segment)
        return segment


def count_differences(
    drawn: Iterable[Drawn], prompts: dict[int, Prompt], episodes: dict[int, Episode]
) -> dict[str, int]:
    """Tokens of rows that differ from what the engine got and drew in id, version or log-prob; tokens not in a row."""
    found = {'turns': 0, 'tokens': 0, 'ids': 0, 'versions': 0, 'logprobs': 0, 'prompts': 0, 'missing': 0}
    generated = 0
    for one in drawn:
        row = episodes[one.request.draw].rows[one.request.row]
        before = prompts[one.request.draw].tokens if row.prompt_tokens is None else row.prompt_tokens
        tokens, versions, logprobs = _columns(before, row.segments)
        begin = len(one.request.prompt_tokens)
        end = begin + sum(len(segment.tokens) for segment in one.segments)
        ids, drawn_versions, drawn_logprobs = _columns(np.zeros(0, np.int32), one.segments)
        found['turns'] += 1
        found['tokens'] += end - begin
        found['prompts'] += not np.array_equal(tokens[:begin], one.request.prompt_tokens)
        found['missing'] += max(0, end - len(tokens))
        for name, ours, theirs in (
            ('ids', tokens, ids), ('versions', versions, drawn_versions), ('logprobs', logprobs, drawn_logprobs)
        ):  # fmt: skip
            found[name] += int((ours[begin:end] != theirs).sum()) if len(ours) >= end else end - begin
    for episode in episodes.values():
        generated += sum(len(s.tokens) for s in episode.all_segments() if s.policy_version != NOT_GENERATED)
    return found | {'in_rows_beyond': generated - found['tokens']}


def _columns(before: np.ndarray, segments: list[Segment]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, versions and log-probs of a prompt and what follows."""
    blank = np.full(len(before), NOT_GENERATED, np.int32)
    versions = [np.full(len(segment.tokens), segment.policy_version, np.int32) for segment in segments]
    logprobs = [np.asarray(segment.behavior_logprobs, np.float32) for segment in segments]
    return (
        concatenate([before, *(segment.tokens for segment in segments)], np.int32),
        concatenate([blank, *versions], np.int32),
        concatenate([np.zeros(len(before), np.float32), *logprobs], np.float32),
    )
