"""The episode as JSON, for a scorer that asks for it: conversations of its rows, results of its tools, how it ended.

groups.py and evaluation/evaluator.py give it to `Verifier.verify`. tasks/scoring/scorer_process.py completes it for an
episode without calls.
"""

from __future__ import annotations

from areal_jax.control.episode import TOOL_LISTING, Call, Episode
from areal_jax.files import JsonObject
from areal_jax.types import NOT_GENERATED

_RESULT_FIELDS = ('name', 'arguments', 'text', 'failed')


def describe_episode(episode: Episode) -> JsonObject:
    """{'sample', 'label', 'turns', 'messages', 'conversations', 'tools', 'outcome'}; no call: `messages` is []."""
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
    """Messages of OpenAI's chat up to the reply of a call, which is included."""
    by_history = {call.after: call for call in episode.calls if call.reply is not None}
    messages: list[JsonObject] = []
    call: Call | None = last
    while call is not None:
        messages[:0] = [*call.messages, dict(call.reply or {})]
        call = by_history.get(call.follows)
    return messages


def _count_turns(episode: Episode) -> int:
    """Of a workflow that appends environment tokens itself: they stand between two turns."""
    return 1 + sum(segment.policy_version == NOT_GENERATED for segment in episode.all_segments())
