"""Replies to programs: turns of an episode in the dialect that they were asked in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

import numpy as np
from aiohttp import web

from areal_jax.agents.dialogue import Reply, Turn
from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.generation import NamedEvents
from areal_jax.rollout.http.wire.exchange import (
    MISSED,
    Answer,
    Call,
    Finish,
    FinishWord,
    Piece,
    ReplyInfo,
    ToolCall,
    name_answers,
)
from areal_jax.rollout.http.wire.openai import find_misses
from areal_jax.rollout.http.wire.sglang import DONE
from areal_jax.types import Segment

MODEL = 'policy'  # what the model of a run is called


def make_answers(call: Call, turns: Sequence[Turn], name: str) -> list[Answer]:
    """What the dialects render; `name` is the id of the reply."""
    names = name_answers(call, name).request_ids
    return [_make_answer(names[index], index, turn) for index, turn in enumerate(turns)]


def render(
    dialect: ModuleType, call: Call, answers: Sequence[Answer], token_text: Callable[[int], str]
) -> web.Response:
    """The whole reply, also of a stream: its events say what they would say one by one."""
    info = ReplyInfo(MODEL, int(time.time()), token_text)
    misses = find_misses(call, answers)
    headers = {MISSED: ', '.join(misses)} if misses else {}
    if not call.stream:
        return web.json_response(dialect.render(call, answers, info), headers=headers)
    events = [_render_events(dialect, call, answer, info) for answer in answers]
    ending = b'' if isinstance(dialect, NamedEvents) else DONE
    content = b''.join([*events, dialect.render_last(call, answers, info), ending])
    return web.Response(body=content, content_type='text/event-stream', headers=headers)


def _render_events(dialect: ModuleType, call: Call, answer: Answer, info: ReplyInfo) -> bytes:
    pieces, finish = answer.pieces, answer.finish
    answer.pieces, answer.finish, found = [], None, []
    for number, piece in enumerate(pieces, start=1):
        answer.pieces.append(piece)
        answer.finish = finish if number == len(pieces) else None
        found.append(dialect.render_event(call, answer, piece, info))
    return b''.join(found)


def _make_answer(name: str, index: int, turn: Turn) -> Answer:
    pieces = [_make_piece(segment) for segment in turn.answer]
    last = pieces[-1]
    text = turn.reply.text
    calls = tuple(_make_call(call, len(text)) for call in turn.reply.tool_calls)
    reasoning = str(turn.reply.message.get('reasoning_content') or '')
    pieces[-1] = Piece(last.tokens, last.logprobs, last.version, last.columns, text, calls, reasoning)
    return Answer(
        name, turn.prompt_tokens, index, pieces, Finish(_finish_word(turn.reply)), version=last.version
    )  # fmt: skip


def _make_piece(segment: Segment) -> Piece:
    return Piece(segment.tokens, np.asarray(segment.behavior_logprobs, np.float32), str(segment.policy_version))


def _make_call(call: object, after: int) -> ToolCall:
    described = cast(JsonObject, call)
    function = described['function']
    return ToolCall(described['id'], function['name'], function['arguments'], after)


def _finish_word(reply: Reply) -> FinishWord:
    return 'length' if reply.finish_reason == 'length' else 'stop'
