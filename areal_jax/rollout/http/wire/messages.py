"""Anthropic's POST /v1/messages and /v1/messages/count_tokens: request and reply."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, Tag

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import bodies, openai
from areal_jax.rollout.http.wire.encoding import frame_named, refuse
from areal_jax.rollout.http.wire.exchange import Answer, Call, Message, Part, Piece, Reasoning, ReplyInfo, ToolCall

_ERROR_TYPES = {
    401: 'authentication_error', 403: 'permission_error', 404: 'not_found_error', 413: 'request_too_large',
    429: 'rate_limit_error', 503: 'overloaded_error', 504: 'timeout_error',
}  # fmt: skip
_REASONS = {'stop': 'end_turn', 'length': 'max_tokens', 'abort': 'abort'}
_IGNORED = (
    'metadata', 'service_tier', 'thinking', 'cache_control', 'context_management', 'inference_geo', 'betas', 'speed',
)  # fmt: skip


class ResultBlock(bodies.Body):
    ignored = ('is_error', 'cache_control')
    type: Literal['tool_result']
    tool_use_id: bodies.Text = ''
    content: openai.Content = ''


class CallBlock(bodies.Body):
    ignored = ('cache_control', 'caller')
    type: Literal['tool_use']
    id: bodies.Text = ''
    name: bodies.Name
    input: bodies.FreeObject = Field({})


class ThoughtBlock(bodies.Skipped):
    """Thoughts that a client sends back."""

    type: Literal['thinking', 'redacted_thinking']


UserBlock: TypeAlias = Annotated[
    Annotated[openai.TextPart, Tag('(text)')] | Annotated[ResultBlock, Tag('(tool_result)')],
    bodies.by('type', ('text', 'tool_result'), 'text'),
]
AssistantBlock: TypeAlias = Annotated[
    Annotated[openai.TextPart, Tag('(text)')]
    | Annotated[CallBlock, Tag('(tool_use)')]
    | Annotated[ThoughtBlock, Tag('(thinking)')],
    bodies.by('type', ('text', 'tool_use', 'thinking', 'redacted_thinking'), 'text', {'redacted_thinking': 'thinking'}),
]


class SystemMessage(bodies.Body):
    ignored = ('cache_control',)
    role: Literal['system']
    content: openai.Content

    def read(self) -> Iterable[Message]:
        return [Message('system', openai.join_text(self.content))]


class UserMessage(bodies.Body):
    """A message of the user: texts, and results of calls."""

    ignored = ('cache_control',)
    role: Literal['user']
    content: bodies.OneOrList[bodies.LongText, UserBlock]

    def read(self) -> Iterable[Message]:
        """Returns a turn for each tool result, and one for each run of texts between them."""
        if isinstance(self.content, str):
            return [Message('user', self.content)]
        return _join('user', map(_read_user_block, self.content))


class AssistantMessage(bodies.Body):
    """A message of the assistant: texts and calls."""

    ignored = ('cache_control',)
    role: Literal['assistant']
    content: bodies.OneOrList[bodies.LongText, AssistantBlock]

    def read(self) -> Iterable[Message]:
        if isinstance(self.content, str):
            return [Message('assistant', self.content)]
        blocks = [block for block in self.content if not isinstance(block, bodies.Skipped)]
        return _join('assistant', map(_read_assistant_block, blocks))


class TypedTool(bodies.Body):
    type: Literal['custom'] = 'custom'


class Tool(openai.Function, TypedTool):
    """A tool."""

    parameters: bodies.FreeObject | None = Field(None, alias='input_schema')


class Choice(bodies.Body):
    """Whether a tool is called."""

    type: Literal['auto', 'any', 'none'] = 'auto'
    disable_parallel_tool_use: bool = False


class NamedChoice(bodies.Body):
    type: Literal['tool']
    name: bodies.Name
    disable_parallel_tool_use: bool = False


class OutputConfig(bodies.Body):
    ignored = ('effort', 'task_budget')
    format: openai.Format | None = None


class CountRequest(openai.Conversation):
    """The body of a request whose prompt is counted."""

    ignored: ClassVar[tuple[str, ...]] = (*_IGNORED, 'max_tokens')
    unserved = ('container', 'mcp_servers')
    messages: bodies.Turns[
        Annotated[
            Annotated[SystemMessage, Tag('(system)')]
            | Annotated[UserMessage, Tag('(user)')]
            | Annotated[AssistantMessage, Tag('(assistant)')],
            bodies.by('role', ('user', 'assistant', 'system')),
        ]
    ]
    system: openai.Content = ''
    tools: openai.Tools[Tool] = Field([])
    tool_choice: Annotated[
        Annotated[Choice, Tag('(auto)')] | Annotated[NamedChoice, Tag('(tool)')],
        bodies.by('type', ('auto', 'any', 'none', 'tool'), 'auto', {'any': 'auto', 'none': 'auto'}),
    ] = bodies.OBJECT
    output_config: OutputConfig = bodies.OBJECT
    output_format: openai.Format | None = None
    stop_sequences: bodies.Stops = ()


class Request(CountRequest):
    ignored = _IGNORED
    max_tokens: bodies.Positive


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    request, ignored = bodies.read(Request, body)
    call = _make_call(request, ignored, request.max_tokens)
    return dataclasses.replace(call, fits_limit=True)  # packages always send one, often a large one


def parse_count(body: object) -> Call:
    """Parses a request body whose prompt is to be counted: `max_tokens` may be absent."""
    return _make_call(*bodies.read(CountRequest, body), None)


def _make_call(request: CountRequest, ignored: set[str], limit: int | None) -> Call:
    system = openai.join_text(request.system)
    turns = [Message('system', system)] if system else []
    turns += [turn for message in request.messages for turn in message.read()]
    if turns[-1].role == 'assistant':
        raise refuse(
            f'messages[{len(request.messages) - 1}].role',
            'assistant',
            'is not served as the last turn: an answer can not go on from a text, end with a turn of the user',
        )
    choice, tools = request.tool_choice, [tool.describe() for tool in request.tools]
    name = choice.name if isinstance(choice, NamedChoice) else ''
    given = choice.type if choice.type in ('auto', 'none') else choice.sent
    asked = openai.choose(given, name, tools, choice.disable_parallel_tool_use)
    wishes = [
        *openai.read_format('output_config.format', request.output_config.format),
        *openai.read_format('output_format', request.output_format),
    ]
    return openai.make_call(request, ignored, turns, 'messages', limit, asked, wishes, request.stop_sequences)


def _read_user_block(block: openai.TextPart | ResultBlock) -> Message:
    if isinstance(block, ResultBlock):
        return Message('tool', openai.join_text(block.content), tool_call_id=block.tool_use_id)
    return Message('user', block.text)


def _read_assistant_block(block: openai.TextPart | CallBlock) -> Message:
    if isinstance(block, CallBlock):
        return Message('assistant', '', (openai.describe_call(block.id, block.name, block.input),))
    return Message('assistant', block.text)


def _join(role: str, turns: Iterable[Message]) -> list[Message]:
    """Joins neighbours of this role; without turns returns an empty one."""
    found: list[Message] = []
    for turn in turns:
        if found and found[-1].role == turn.role == role:
            last = found[-1]
            found[-1] = Message(role, last.content + turn.content, (*last.tool_calls, *turn.tool_calls))
        else:
            found.append(turn)
    return found or [Message(role, '')]


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply with the blocks of the one answer."""
    answer = answers[0]
    blocks = [_render_block(part) for part in answer.parts]
    return _render_message(call, answer, info) | _render_end(call, answer) | {'content': blocks}


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the events of `piece`, the answer's last; the first event announces the message."""
    written, found = answer.written, []
    if not written.events:
        message = _render_message(call, answer, info)
        found.append({'type': 'message_start', 'message': message | {'usage': _count(answer) | {'output_tokens': 0}}})
    for part in piece.parts:
        found += _add_text(answer, part) if isinstance(part, str) else [*_close(answer), *_add_whole(answer, part)]
    if answer.finish is not None:
        end = _render_end(call, answer)
        delta = {'stop_reason': end.pop('stop_reason'), 'stop_sequence': end.pop('stop_sequence')}
        found += [*_close(answer), {'type': 'message_delta', 'delta': delta, **end}, {'type': 'message_stop'}]
    written.events += len(found)
    return b''.join(frame_named(event) for event in found)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Returns no bytes: message_stop was the last event."""
    return b''


def render_error(message: str, status: int, field: str = '') -> JsonObject:
    """Renders the body of a refusal; the sentence names the field."""
    kind = _ERROR_TYPES.get(status, 'api_error' if status >= 500 else 'invalid_request_error')
    return {'type': 'error', 'error': {'type': kind, 'message': message}}


def render_failure(answers: Sequence[Answer], message: str, status: int, field: str) -> bytes:
    """Renders the last event of a stream that fails."""
    return frame_named(render_error(message, status))


# Replies.


def _render_message(call: Call, answer: Answer, info: ReplyInfo) -> JsonObject:
    """Renders the message before its first token."""
    return {
        'id': f'msg_{answer.request_id}', 'type': 'message', 'role': 'assistant', 'model': call.model or info.model,
        'content': [], 'stop_reason': None, 'stop_sequence': None,
    }  # fmt: skip


def _render_end(call: Call, answer: Answer) -> JsonObject:
    """Renders the answer's finish reason and its token counts."""
    finish = answer.finish
    assert finish is not None
    matched = finish.matched if isinstance(finish.matched, str) else None
    reason = _REASONS[finish.reason]
    if finish.reason == 'stop':
        reason = 'tool_use' if answer.calls else 'stop_sequence' if matched else reason
    return {
        'stop_reason': reason,
        'stop_sequence': matched,
        'usage': _count(answer),
        'metadata': openai.metadata(answer),
    }


def _count(answer: Answer) -> JsonObject:
    cached = answer.cached_tokens
    return {
        'input_tokens': len(answer.prompt_tokens) - cached,
        'cache_creation_input_tokens': 0,
        'cache_read_input_tokens': cached,
        'output_tokens': answer.n_tokens,
    }


def _render_block(part: Part) -> JsonObject:
    if isinstance(part, str):
        return {'type': 'text', 'text': part}
    if isinstance(part, Reasoning):
        return {'type': 'thinking', 'thinking': part.text, 'signature': ''}
    return {'type': 'tool_use', 'id': part.id, 'name': part.name, 'input': json.loads(part.arguments)}


# Events.


def _add_text(answer: Answer, text: str) -> list[JsonObject]:
    written, found = answer.written, []
    if not written.in_text:
        written.in_text, written.parts = True, written.parts + 1
        found = [_start(answer, {'type': 'text', 'text': ''})]
    return [*found, _delta(answer, {'type': 'text_delta', 'text': text})]


def _add_whole(answer: Answer, part: ToolCall | Reasoning) -> list[JsonObject]:
    """Renders the events of a part that comes all at once."""
    answer.written.parts += 1
    empty: JsonObject = {'input': {}}
    if isinstance(part, Reasoning):
        empty, delta = {'thinking': ''}, {'type': 'thinking_delta', 'thinking': part.text}
    else:
        delta = {'type': 'input_json_delta', 'partial_json': part.arguments}
    return [_start(answer, _render_block(part) | empty), _delta(answer, delta), _stop(answer)]


def _close(answer: Answer) -> list[JsonObject]:
    """Ends the open text block, if there is one."""
    found = [_stop(answer)] if answer.written.in_text else []
    answer.written.in_text = False
    return found


def _start(answer: Answer, block: JsonObject) -> JsonObject:
    return {'type': 'content_block_start', 'index': answer.written.parts - 1, 'content_block': block}


def _delta(answer: Answer, delta: JsonObject) -> JsonObject:
    return {'type': 'content_block_delta', 'index': answer.written.parts - 1, 'delta': delta}


def _stop(answer: Answer) -> JsonObject:
    return {'type': 'content_block_stop', 'index': answer.written.parts - 1}
