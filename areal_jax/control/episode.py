"""Admitted groups until they enter the buffer: their episodes, with the outcome of each.

The controller drives them, workflows fill episodes (protocols.Episode), checkpoint/store.py saves them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.columns import ColumnArrays, join, of_models
from areal_jax.files import JsonObject
from areal_jax.types import (
    NOT_GENERATED,
    FinishReason,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryGroup,
    Verdict,
    concatenate,
)

CANCELLED = 'cancelled'  # label of an episode whose request was cancelled: it has no answer to verify
LOST = 'lost'  # label of an episode whose request was lost by all engines: its group is dropped
TOOL_LISTING = 'tools/list'  # name of the call that lists the tools of MCP servers; not made by the policy


@dataclasses.dataclass(eq=False)
class Row:
    """One sequence of tokens under construction: a prompt, and the segments after it."""

    prompt_tokens: np.ndarray | None = None  # int32 [P]; None: the prompt of the draw
    fork: str = ''  # why another row began; '' for the first row
    segments: list[Segment] = dataclasses.field(default_factory=list)

    def append(self, segment: Segment) -> None:
        """Adds the segment; joins it to the last segment if both have the same version and the same columns.

        Keeps only the part of its context that no policy generated.
        """
        last = self.segments[-1] if self.segments else None
        if segment.context:
            segment = dataclasses.replace(segment, context=self._unseen(segment.context))
        if last and last.policy_version == segment.policy_version and last.columns.keys() == segment.columns.keys():
            segment = join_segments(self.segments.pop(), segment)
        self.segments.append(segment)

    def _unseen(self, context: ColumnArrays) -> ColumnArrays:
        """The end of a context's columns: after the last generated token, or all if no token was generated."""
        read = 0
        for segment in reversed(self.segments):
            if segment.policy_version != NOT_GENERATED:
                return {name: values[len(values) - read :] for name, values in context.items()}
            read += len(segment.tokens)
        return context

    def copy(self) -> Row:
        return Row(self.prompt_tokens, self.fork, list(self.segments))


@dataclasses.dataclass(eq=False)
class Call:
    """A call for the next turn of a conversation, kept for a resumed episode: the question and the answer's place.

    Histories are hexadecimal digests of messages and tools (agents/dialogue.py).
    """

    asked: str  # history of the call
    first: str  # digest of its first message
    row: int  # number of the row with the answer
    start: int  # number of segments of the row before the answer
    began_row: bool  # whether the row began with this call
    messages: Sequence[JsonObject]  # its messages: all, or only those after the turn with the history `follows`
    follows: str  # `after` of an earlier call; '' = none
    # the fields below are set when the answer is complete
    reply: Mapping[str, Any] | None = None  # the message that the program got; None: the answer is under way
    after: str = ''  # history that ends with the reply
    after_without_tools: str = ''
    end: int = 0  # tokens of the row up to the end of the answer, prompt included
    closed: bool = False  # whether the last of these tokens ends a turn
    finish_reason: str = ''  # of the reply


@dataclasses.dataclass(eq=False)
class Episode:
    """One sample of a prompt: one row, to which the workflow appends, or several."""

    sample: int
    finish_reason: FinishReason | None = None  # None: the answer is unfinished, or was cancelled
    engine: str = ''  # the engine of the last request; a resumed episode prefers it
    rows: list[Row] = dataclasses.field(default_factory=lambda: [Row()])
    calls: list[Call] = dataclasses.field(default_factory=list)  # of a program, in order of arrival
    results: list[JsonObject] = dataclasses.field(default_factory=list)  # of tools: see agents/dialogue.py
    label: str = ''  # of an agent, why it ended (agents/dialogue.py); '' = not ended, or only a finish reason
    discarded: dict[int, int] = dataclasses.field(default_factory=dict)  # sampled tokens removed from a row, by version
    counts: dict[str, int] = dataclasses.field(default_factory=dict)  # actions of its program (agents/), by name
    outcome: JsonObject | None = None  # the environment's result, with `reward`; None: no environment

    @property
    def segments(self) -> list[Segment]:
        """The segments of the newest row."""
        return self.rows[-1].segments

    @segments.setter
    def segments(self, segments: list[Segment]) -> None:
        self.rows[-1].segments = segments

    def append(self, segment: Segment) -> None:
        """Adds the segment to the newest row."""
        self.rows[-1].append(segment)

    def fork(self, prompt_tokens: np.ndarray, reason: str) -> Row:
        """Begins another row, for a conversation that does not continue an earlier row; the row keeps `reason`."""
        self.rows.append(Row(prompt_tokens, reason))
        return self.rows[-1]

    def copy(self) -> Episode:
        """A copy of the episode at this instant, unaffected by later changes."""
        rows, calls = [row.copy() for row in self.rows], [dataclasses.replace(call) for call in self.calls]
        return dataclasses.replace(
            self, rows=rows, calls=calls, results=list(self.results), discarded=dict(self.discarded),
            counts=dict(self.counts),
        )  # fmt: skip

    def count(self, **numbers: int) -> None:
        """Adds to `counts`; zeros add no name."""
        for name, number in numbers.items():
            if number:
                self.counts[name] = self.counts.get(name, 0) + number

    def discard(self, segments: Iterable[Segment]) -> None:
        """Counts sampled tokens that were removed from their row."""
        for segment in segments:
            if segment.policy_version != NOT_GENERATED:
                before = self.discarded.get(segment.policy_version, 0)
                self.discarded[segment.policy_version] = before + len(segment.tokens)

    def all_segments(self) -> list[Segment]:
        """The segments of all rows, in their order."""
        return [segment for row in self.rows for segment in row.segments]

    def describe_end(self, lost: str) -> dict[str, object]:
        """Returns the fields of the event `finish`, without the draw; None for a field that the event lacks.

        Args:
          lost: label of an answer that the verifier does not judge; '' = it is verified, or was cancelled.
        """
        segments, forks = self.all_segments(), [row.fork for row in self.rows[1:]]
        lengths = [len(segment.tokens) for segment in segments]
        return {
            'sample': self.sample,
            'tokens': sum(lengths),
            'reason': lost or self.label or self.finish_reason or CANCELLED,
            'versions': [segment.policy_version for segment in segments],
            'lengths': lengths,
            'rows': [len(row.segments) for row in self.rows] if forks else None,
            'forks': forks or None,
            'turns': sum(call.reply is not None for call in self.calls) if self.label else None,
            'discarded': sorted(map(list, self.discarded.items())) or None,
            'counts': sorted(map(list, self.counts.items())) or None,
            'routes': digest_routes(segments) or None,
        }


@dataclasses.dataclass(eq=False)
class RunningGroup:
    """An admitted group: its episodes, and for each ended episode its trajectories or the label of its failure."""

    prompt: Prompt
    admitted_s: float
    episodes: list[Episode]
    finished: dict[int, tuple[Trajectory, ...]] = dataclasses.field(default_factory=dict)  # rows by sample
    # sample -> label of the verdict, CANCELLED or LOST
    failed: dict[int, str] = dataclasses.field(default_factory=dict)

    def copy(self) -> RunningGroup:
        """A copy of the group at this instant, unaffected by later changes."""
        episodes = [episode.copy() for episode in self.episodes]
        return RunningGroup(self.prompt, self.admitted_s, episodes, dict(self.finished), dict(self.failed))

    @property
    def complete(self) -> bool:
        return len(self.finished) + len(self.failed) == len(self.episodes)

    def record(self, episode: Episode, verdict: Verdict | None, finished_s: float) -> None:
        """Records an ended episode: its rows, or the label of its failure. verdict=None: it was cancelled."""
        if verdict is None or verdict.failed:
            self.failed[episode.sample] = CANCELLED if verdict is None else verdict.label
            return
        assert episode.finish_reason is not None
        self.finished[episode.sample] = tuple(
            Trajectory(
                prompt=self._prompt_of(row),
                sample=episode.sample,
                segments=tuple(row.segments),
                reward=verdict.reward,
                finish_reason=episode.finish_reason,
                engine=episode.engine,
                admitted_s=self.admitted_s,
                finished_s=finished_s,
                label=verdict.label,
                row=number,
            )
            for number, row in enumerate(episode.rows)
        )

    def _prompt_of(self, row: Row) -> Prompt:
        """The row's prompt; the draw's own Prompt object if the row uses it, so that rows are packed with it once."""
        if row.prompt_tokens is None:
            return self.prompt
        return dataclasses.replace(self.prompt, tokens=row.prompt_tokens)

    @property
    def all_cancelled(self) -> bool:
        """Whether every episode was cancelled."""
        return len(self.failed) == len(self.episodes) and set(self.failed.values()) == {CANCELLED}

    def describe_loss(self) -> str:
        """The numbers of tokens of lost and of finished answers, in words; '' if no answer is lost."""
        lost = [sample for sample, label in self.failed.items() if label == LOST]
        if not lost:
            return ''
        tokens = {e.sample: sum(len(segment.tokens) for segment in e.all_segments()) for e in self.episodes}
        kept = [tokens[sample] for sample in tokens if sample not in lost]
        return f'lost answers of {sorted(tokens[sample] for sample in lost)} tokens, finished ones of {sorted(kept)}'

    def group(self) -> TrajectoryGroup:
        ordered = tuple(row for sample in sorted(self.finished) for row in self.finished[sample])
        return TrajectoryGroup(self.prompt.draw, ordered)


def digest_routes(segments: Iterable[Segment]) -> str:
    """16 hexadecimal digits of the hash of the experts recorded for the tokens and contexts; '' = no record."""
    digest, known = hashlib.sha256(), False
    for columns in (columns for segment in segments for columns in (segment.context, segment.columns)):
        for recorded in (columns[column.name] for column in of_models() if column.name in columns):
            digest.update(f'{recorded.dtype} {recorded.shape}'.encode() + np.ascontiguousarray(recorded).tobytes())
            known = True
    return digest.hexdigest()[:16] if known else ''


def join_segments(first: Segment, second: Segment) -> Segment:
    """Joins two segments of the same policy version and with the same columns."""
    return Segment(
        concatenate([first.tokens, second.tokens], np.int32),
        concatenate([first.behavior_logprobs, second.behavior_logprobs], np.float32),
        first.policy_version,
        join([first.columns, second.columns]),
        first.context,
    )


# The episode as JSON, for a scorer that asks for it: conversations of its rows, results of its tools, its end.
#
# groups.py and evaluation/evaluator.py pass it to `Verifier.verify`. tasks/scoring/worker.py completes it for
# an episode without calls.


_RESULT_FIELDS = ('name', 'arguments', 'text', 'failed')


def describe_episode(episode: Episode) -> JsonObject:
    """{'sample', 'label', 'turns', 'messages', 'conversations', 'tools', 'outcome'}; without calls `messages` is []."""
    answered = [call for call in episode.calls if call.reply is not None]
    newest = {call.row: call for call in answered}
    conversations = [read_conversation(episode, newest[row]) for row in sorted(newest)]
    tools = [result for result in episode.results if result['name'] != TOOL_LISTING]
    return {
        'sample': episode.sample,
        'label': episode.label or episode.finish_reason,
        'turns': len(answered) or _count_turns(episode),
        'messages': conversations[-1] if conversations else [],
        'conversations': conversations,
        'tools': [{name: result[name] for name in _RESULT_FIELDS} for result in tools],
        'outcome': episode.outcome,
    }


def read_conversation(episode: Episode, last: Call) -> list[JsonObject]:
    """The messages of a conversation (OpenAI's format) up to and including the reply of the call `last`."""
    by_history = {call.after: call for call in episode.calls if call.reply is not None}
    messages: list[JsonObject] = []
    call: Call | None = last
    while call is not None:
        messages[:0] = [*call.messages, dict(call.reply or {})]
        call = by_history.get(call.follows)
    return messages


def _count_turns(episode: Episode) -> int:
    """The turns of a workflow that itself appends environment tokens, which separate two turns."""
    return 1 + sum(segment.policy_version == NOT_GENERATED for segment in episode.all_segments())
