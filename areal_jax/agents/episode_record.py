"""The record that a server of verifiers keeps of an episode: the policy's turns, the ending and the reward.

Deltas add to the traces of an episode. One agent has one trace: a graph of messages, of which the sampled ones are the
policy's turns. If a client relays requests to an API, as ours does, the messages have no ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np

from areal_jax.agents.programs.endings import shorten
from areal_jax.agents.programs.program_host import Ending, Record, SaidTurn
from areal_jax.files import JsonObject

_MOST_OUTCOME_BYTES = 2**16  # an outcome is written to the event log
_LISTS = ('nodes', 'errors')  # of a trace: a delta appends to them


# errors of reading a message that has another form
_OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class RecordError(Exception):
    """Raised for a record that is not an episode of one agent."""


class EpisodeRecord:
    """The record of one request, which grows with each delta."""

    def __init__(self) -> None:
        self._traces: dict[str, JsonObject] = {}

    def add(self, delta: JsonObject) -> None:
        """Adds a delta; raises RecordError if it cannot be read."""
        try:
            self._add(delta)
        except _OTHER_FORM as error:
            raise _other_form(error) from error

    def finish(self, reply: JsonObject) -> Ending:
        """Returns the ending of the episode, from the last reply to its request. Raises RecordError."""
        try:
            ending = self._finish(reply)
            json.dumps(ending.record and ending.record.outcome)  # raises now: the event log will write it
        except _OTHER_FORM as error:
            raise _other_form(error) from error
        return ending

    def _add(self, delta: JsonObject) -> None:
        name = delta['trace']
        if delta.get('discard'):  # an attempt that the server has abandoned
            self._traces.pop(name, None)
            return
        trace = self._traces.setdefault(name, {field: [] for field in _LISTS})
        for field in _LISTS:
            trace[field].extend(delta.get(field, ()))
        trace.update(delta.get('set') or {})

    def _finish(self, reply: JsonObject) -> Ending:
        if not reply.get('success'):
            return Ending('lost', shorten(f'the environment: {reply.get("error")}'))
        head, summaries = reply['head'], reply['traces']
        if len(summaries) != 1:
            said = _describe_errors(head.get('errors', ()))
            return Ending('lost', shorten(f'its episode has {len(summaries)} traces, and one agent is trained{said}'))
        trace = self._traces.get(summaries[0]['id'])
        if trace is None or len(trace['nodes']) != summaries[0]['nodes']:
            raise RecordError('the record of an episode lacks messages that its server counts')
        return _read_ending(trace, head)


def _other_form(error: Exception) -> RecordError:
    return RecordError(f'the server sent what is no episode: {type(error).__name__}: {error}')


def _read_ending(trace: JsonObject, head: JsonObject) -> Ending:
    said = tuple(_read_turn(node) for node in trace['nodes'] if node['sampled'])
    lost = lambda reason: Ending('lost', shorten(f'the environment{reason}'), Record(said))
    if not (trace.get('ok') and head.get('ok')):  # the trace keeps the errors of attempts that were repeated
        return lost(_describe_errors([*trace['errors'], *head.get('errors', ())]) or ' did not complete the episode')
    rewards = trace.get('rewards') or {}
    unscored = [name for name, reward in rewards.items() if reward is None]
    if unscored or not rewards:
        return lost(f' gave no reward: {", ".join(unscored)} did not score' if unscored else ' has no reward')
    parts = {name: float(part['score']) for name, part in rewards.items()}
    reward = sum(parts[name] * float(part['weight']) for name, part in rewards.items())
    if not math.isfinite(reward):
        return lost(f' gave the reward {reward}')
    outcome = {
        'reward': reward,
        'rewards': parts,
        'metrics': trace.get('metrics') or {},
        'stop': trace.get('stop_condition'),
    }
    if (size := len(json.dumps(outcome))) > _MOST_OUTCOME_BYTES:
        return lost(f' gave an outcome of {size} bytes, and {_MOST_OUTCOME_BYTES} is the most: return fewer metrics')
    return Ending('ended', record=Record(said, outcome))


def _read_turn(node: JsonObject) -> SaidTurn:
    message, ids = node['message'], node.get('token_ids')
    sampled = [token for token, is_sampled in zip(ids, node['mask'], strict=True) if is_sampled] if ids else None
    calls = tuple((call['name'], call['arguments']) for call in message.get('tool_calls') or ())
    return SaidTurn(_read_text(message.get('content')), calls, None if sampled is None else np.array(sampled, np.int32))


def _read_text(content: object) -> str:
    if isinstance(content, list):  # parts
        return ''.join(str(part.get('text', '')) for part in content)
    return str(content or '')


def _describe_errors(errors: Sequence[JsonObject]) -> str:
    return f': {errors[-1].get("type")}: {errors[-1].get("message")}' if errors else ''
