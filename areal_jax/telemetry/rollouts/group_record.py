"""A trained group as one JSON object: its prompt, and of each answer text, tokens, log-probs, reward and advantage.

Lists by token are aligned with the tokens of the answer; where nothing was generated (a tool's output) they hold null.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.telemetry.metrics import plain
from areal_jax.types import NOT_GENERATED, TokenArrays, Trajectory, TrajectoryGroup

Decode = Callable[[np.ndarray], str]
_CONSTANT = ('ratio', 'weight')  # often one number for all tokens, which is written once
_BY_TOKEN = (
    'tokens', 'versions', 'ages', 'ends', 'behavior_logprobs', 'policy_logprobs', 'proximal_logprobs', 'ratio',
    'weight', 'clip', 'loss_mask', 'closed',
)  # fmt: skip
_CLIPPED = {0: '.', 1: '+', -1: '-'}


def describe_group(update: int, group: TrajectoryGroup, tokens: Sequence[TokenArrays], decode: Decode) -> JsonObject:
    """The record of a group that update number `update` took.

    Args:
      tokens: what the update knew of the tokens of each trajectory; empty for a group that it did not train.
    """
    known = tokens or [{}] * len(group.trajectories)
    prompt = group.trajectories[0].prompt
    answers = [
        _describe_answer(update, trajectory, arrays, prompt.tokens, decode)
        for trajectory, arrays in zip(group.trajectories, known, strict=True)
    ]
    return {
        'update': update,
        'draw': group.draw,
        'task': prompt.task,
        'trained': bool(tokens),
        'prompt': _describe_prompt(prompt.tokens, decode),
        'problem': plain(prompt.problem),
        'answers': answers,
    }


def write_record(record: JsonObject, most_bytes: int) -> str:
    """The record as a line of at most so many bytes: one that is longer loses its lists by token, then parts of texts.

    'cut' then says so.
    """
    line = json.dumps(record, separators=(',', ':'))
    if len(line) <= most_bytes:
        return line
    answers = [{k: v for k, v in answer.items() if k not in _BY_TOKEN} for answer in record['answers']]
    prompt = {'text': record['prompt']['text']}
    shorter = {**record, 'prompt': prompt, 'answers': answers, 'cut': 'tokens'}
    line = json.dumps(shorter, separators=(',', ':'))
    if len(line) <= most_bytes:
        return line
    most = max(16, most_bytes // (12 * (len(answers) + 1)))  # a character takes at most 12 bytes
    cut = [{**_without_prompt(answer), 'text': answer['text'][:most]} for answer in answers]
    rest = {**shorter, 'prompt': {'text': prompt['text'][:most]}, 'problem': {}, 'answers': cut, 'cut': 'texts'}
    return json.dumps(rest, separators=(',', ':'))


def _without_prompt(answer: JsonObject) -> JsonObject:
    return {name: value for name, value in answer.items() if name != 'prompt'}


def _describe_prompt(tokens: np.ndarray, decode: Decode) -> JsonObject:
    return {'text': decode(tokens), 'tokens': tokens.tolist()}


def _describe_answer(
    update: int, row: Trajectory, arrays: TokenArrays, shared: np.ndarray, decode: Decode
) -> JsonObject:
    generated = row.loss_mask[len(row.prompt.tokens) :]
    own = {} if np.array_equal(row.prompt.tokens, shared) else {'prompt': _describe_prompt(row.prompt.tokens, decode)}
    text = decode(row.answer_tokens)
    return {
        'sample': row.sample,
        'row': row.row,
        'reward': plain(float(row.reward)) if row.engine else None,  # an answer that was given has none
        'label': row.label if row.engine else 'given',
        'finish': row.finish_reason,
        'advantage': _join_equal(arrays['advantages']) if arrays and row.engine else None,
        **own,
        'text': text,
        'tokens': row.answer_tokens.tolist(),
        **(_describe_sampling(update, row, text, decode) if row.engine else {}),
        **_describe_tokens(arrays, generated),
    }


def _describe_sampling(update: int, row: Trajectory, text: str, decode: Decode) -> JsonObject:
    """Who generated an answer, when, and under which versions."""
    start = len(row.prompt.tokens)
    generated = row.loss_mask[start:]
    spans = [(version, len(list(same))) for version, same in itertools.groupby(row.policy_versions[start:].tolist())]
    return {
        'engine': row.engine,
        'admitted_s': plain(row.admitted_s),
        'finished_s': plain(row.finished_s),
        'consumed_s': plain(row.consumed_s),
        'versions': [[count, version] for version, count in spans],
        'ages': [None if version == NOT_GENERATED else update - 1 - version for version, _ in spans],
        'ends': _find_ends(row.answer_tokens, [count for _, count in spans], text, decode),
        'behavior_logprobs': _align(_shorten(row.behavior_logprobs[start:][generated]), generated),
    }


def _find_ends(tokens: np.ndarray, counts: Sequence[int], text: str, decode: Decode) -> list[int]:
    """Where in the text each span ends: a character of which only a part is decoded yet belongs to the next span."""
    ends = [_count_shared(decode(tokens[:end]), text) for end in itertools.accumulate(counts[:-1])]
    return [*ends, len(text)]


def _count_shared(one: str, other: str) -> int:
    """Characters at the beginning of both."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _describe_tokens(arrays: TokenArrays, generated: np.ndarray) -> JsonObject:
    """What the update knew, under the names of learning.diagnostics.trained_tokens."""
    found: JsonObject = {}
    for name, values in arrays.items():
        if name == 'advantages':
            continue
        if name == 'clip':
            found[name] = ''.join(_align([_CLIPPED[value] for value in values.tolist()], generated, ' '))
        elif values.dtype == bool:
            if name == 'loss_mask' or values.any():
                found[name] = ''.join(_align(['1' if value else '0' for value in values.tolist()], generated, ' '))
        elif name in _CONSTANT and isinstance(joined := _join_equal(values), float):
            found[name] = joined
        else:
            found[name] = _align(_shorten(values), generated)
    return found


def _align(values: Iterable[object], generated: np.ndarray, blank: object = None) -> list:
    """The values at the generated tokens, `blank` at the others."""
    each = iter(values)
    return [next(each) if is_generated else blank for is_generated in generated.tolist()]


def _shorten(values: np.ndarray) -> list[float | None]:
    """The numbers with as few digits as give the same float32 again; None for what is no number."""
    return [plain(float(str(value))) for value in values]


def _join_equal(values: np.ndarray) -> float | list[float | None] | None:
    """One number where all are equal."""
    if len(values) and (values == values[0]).all():
        return _shorten(values[:1])[0]
    return _shorten(values)
