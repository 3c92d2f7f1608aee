"""OpenAI's POST /v1/responses: request and reply. Nothing is stored, so a request has the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Tag

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import bodies, openai, vllm
from areal_jax.rollout.http.wire.encoding import frame_named, refuse
from areal_jax.rollout.http.wire.exchange import Answer, Call, Message, Part, Piece, Reasoning, ReplyInfo, ToolCall
from areal_jax.rollout.http.wire.openai import Part as TextPart

render_error = vllm.render_error


_STORED = ('previous_response_id', 'conversation')
_OF_ITEMS = ('id', 'status', 'phase', 'namespace')  # in items that clients send back


class InputPart(TextPart):
    """A part of an item."""

    type: Literal['input_text', 'output_text', 'text'] = 'input_text'


Content: TypeAlias = bodies.OneOrList[bodies.LongText, InputPart]


class MessageItem(bodies.Body):
    """A turn, or a text of a turn."""

    ignored = _OF_ITEMS
    type: Literal['message'] = 'message'
    role: Literal['user', 'assistant', 'system', 'developer']
    content: Content

    def read(self) -> Message:
        """Returns the turn, with the role that templates know."""
        return Message('system' if self.role == 'developer' else self.role, openai.join_text(self.content))


class CallItem(bodies.Body):
    ignored = _OF_ITEMS
    type: Literal['function_call']
    call_id: bodies.Text = ''
    name: bodies.Name
    arguments: bodies.Arguments

    def read(self) -> Message:
        return Message('assistant', '', (openai.describe_call(self.call_id, self.name, self.arguments),))


class ResultItem(bodies.Body):
    ignored = _OF_ITEMS
    type: Literal['function_call_output']
    call_id: bodies.Text = ''
    output: Content

    def read(self) -> Message:
        return Message('tool', openai.join_text(self.output), tool_call_id=self.call_id)


class ReasoningItem(bodies.Skipped):
    """Reasoning that a client sends back."""

    type: Literal['reasoning']


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag('(message)')]
    | Annotated[CallItem, Tag('(function_call)')]
    | Annotated[ResultItem, Tag('(function_call_output)')]
    | Annotated[ReasoningItem, Tag('(reasoning)')],
    bodies.by('type', ('message', 'function_call', 'function_call_output', 'reasoning'), 'message'),
]


class Tool(openai.Function, openai.TypedTool):
    """A tool."""


class NamedTool(bodies.Body):
    type: Literal['function'] = 'function'
    name: bodies.Name


class TextOptions(bodies.Body):
    """The object `text`."""

    ignored = ('verbosity',)
    format: openai.Format | None = None


class Request(openai.Conversation):
    ignored = (
        'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key', 'prompt_cache_retention',
        'reasoning', 'truncation', 'include', 'max_tool_calls', 'stream_options',
    )  # fmt: skip
    unserved = (*_STORED, 'background', 'prompt', 'top_logprobs')
    fixes = dict.fromkeys(_STORED, 'is not served, for nothing is stored: send the whole conversation as input')
    input: bodies.OneOrTurns[bodies.Spelled, Item]
    instructions: bodies.LongText = ''
    max_output_tokens: bodies.Positive | None = None
    tools: openai.Tools[Tool] = Field([])
    tool_choice: openai.WordOr[NamedTool] = 'auto'
    parallel_tool_calls: bool = True
    text: TextOptions = bodies.OBJECT


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    request, ignored = bodies.read(Request, body)
    turns = [Message('system', request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        turns.append(Message('user', request.input))
    else:
        items = [item.read() for item in request.input if not isinstance(item, bodies.Skipped)]
        if not items:
            raise refuse('input', request.sent['input'], 'has no message: send one')
        turns += openai.join_assistant(items)
    choice = request.tool_choice
    given, name = (choice, '') if isinstance(choice, str) else (choice.sent, choice.name)
    asked = openai.choose(given, name, [tool.describe() for tool in request.tools], not request.parallel_tool_calls)
    wishes = openai.read_format('text.format', request.text.format)
    return openai.make_call(request, ignored, turns, 'input', request.max_output_tokens, asked, wishes)


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply with the items of the one answer."""
    return _render_response(call, answers[0], info)


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the events of `piece`, the answer's last; the first events announce the response."""
    found: list[JsonObject] = []
    if not answer.written.events:
        begun = _render_response(call, answer, info, begins=True)
        found += [{'type': f'response.{word}', 'response': begun} for word in ('created', 'in_progress')]
    for part in piece.parts:
        found += _add_text(answer, part) if isinstance(part, str) else [*_close(answer), *_add_whole(answer, part)]
    if answer.finish is not None:
        response = _render_response(call, answer, info)
        found += [*_close(answer), {'type': f'response.{response["status"]}', 'response': response}]
    return b''.join(_number(answer, event) for event in found)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Returns no bytes: the event that ends a response contains everything."""
    return b''


def render_failure(answers: Sequence[Answer], message: str, status: int, field: str) -> bytes:
    """Renders the last event of a stream that fails."""
    return _number(answers[0], {'type': 'error', 'code': str(status), 'message': message, 'param': field or None})


# Replies.


def _render_response(call: Call, answer: Answer, info: ReplyInfo, begins: bool = False) -> JsonObject:
    """Renders the whole response; with `begins`, its state before the first token."""
    sampling, finish = call.sampling[0], None if begins else answer.finish
    reasons = {'stop': None, 'length': 'max_output_tokens', 'abort': 'aborted'}
    reason = reasons[finish.reason] if finish else None
    wish = next((wish.value for wish in call.wishes if wish.field == 'tool_choice'), 'auto')
    parts = [] if begins else answer.parts
    return {
        'id': f'resp_{answer.request_id}',
        'object': 'response',
        'created_at': info.created_s,
        'status': 'in_progress' if finish is None else 'incomplete' if reason else 'completed',
        'error': None,
        'incomplete_details': {'reason': reason} if reason else None,
        'model': call.model or info.model,
        'output': [_render_item(answer, index, part) for index, part in enumerate(parts)],
        'parallel_tool_calls': not call.one_tool_call,
        'previous_response_id': None,
        'store': False,
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'max_output_tokens': sampling.max_new_tokens,
        'tool_choice': wish,
        'tools': [{'type': 'function', 'strict': False, **tool['function']} for tool in call.tools],
        'usage': None if finish is None else _count(answer),
        'metadata': {},
        'weights': openai.metadata(answer),
    }


def _count(answer: Answer) -> JsonObject:
    prompt, new = len(answer.prompt_tokens), answer.n_tokens
    return {
        'input_tokens': prompt,
        'input_tokens_details': {'cached_tokens': answer.cached_tokens},
        'output_tokens': new,
        'output_tokens_details': {'reasoning_tokens': 0},
        'total_tokens': prompt + new,
    }


def _render_item(answer: Answer, index: int, part: Part, begins: bool = False) -> JsonObject:
    """Renders a part of the answer; with `begins`, its state before its first character."""
    status = 'in_progress' if begins else 'completed'
    if isinstance(part, Reasoning):
        return {
            'type': 'reasoning', 'id': f'rs_{answer.request_id}_{index}', 'summary': [], 'status': status,
            'content': [] if begins else [{'type': 'reasoning_text', 'text': part.text}],
        }  # fmt: skip
    if isinstance(part, ToolCall):
        return {
            'type': 'function_call', 'id': f'fc_{part.id}', 'call_id': part.id, 'name': part.name,
            'arguments': '' if begins else part.arguments, 'status': status,
        }  # fmt: skip
    return {
        'type': 'message', 'id': f'msg_{answer.request_id}_{index}', 'role': 'assistant', 'status': status,
        'content': [] if begins else [_render_text(part)],
    }  # fmt: skip


def _render_text(text: str) -> JsonObject:
    return {'type': 'output_text', 'text': text, 'annotations': [], 'logprobs': []}


# Events.


def _number(answer: Answer, event: JsonObject) -> bytes:
    number, answer.written.events = answer.written.events, answer.written.events + 1
    return frame_named(event | {'sequence_number': number})


def _add_text(answer: Answer, text: str) -> list[JsonObject]:
    written, found = answer.written, []
    if not written.in_text:
        written.in_text, written.parts = True, written.parts + 1
        item = _render_item(answer, written.parts - 1, text, begins=True)
        place = _place(answer)
        found = [
            {'type': 'response.output_item.added', 'output_index': written.parts - 1, 'item': item},
            {'type': 'response.content_part.added', **place, 'part': _render_text('')},
        ]
    return [*found, {'type': 'response.output_text.delta', **_place(answer), 'delta': text, 'logprobs': []}]


def _close(answer: Answer) -> list[JsonObject]:
    """Ends the open text, if there is one."""
    written = answer.written
    if not written.in_text:
        return []
    written.in_text, index = False, written.parts - 1
    text, place = answer.parts[index], _place(answer)
    assert isinstance(text, str)
    return [
        {'type': 'response.output_text.done', **place, 'text': text, 'logprobs': []},
        {'type': 'response.content_part.done', **place, 'part': _render_text(text)},
        {'type': 'response.output_item.done', 'output_index': index, 'item': _render_item(answer, index, text)},
    ]


def _add_whole(answer: Answer, part: ToolCall | Reasoning) -> list[JsonObject]:
    """Renders the events of a part that comes all at once."""
    index, answer.written.parts = answer.written.parts, answer.written.parts + 1
    begun, done = (_render_item(answer, index, part, begins=begins) for begins in (True, False))
    place = {'output_index': index, 'item_id': done['id']}
    if isinstance(part, Reasoning):
        place['content_index'] = 0
        filled, text, whole = 'response.reasoning_text', part.text, {'text': part.text}
    else:
        filled, text = 'response.function_call_arguments', part.arguments
        whole = {'name': part.name, 'arguments': part.arguments}
    return [
        {'type': 'response.output_item.added', 'output_index': index, 'item': begun},
        {'type': f'{filled}.delta', **place, 'delta': text},
        {'type': f'{filled}.done', **place, **whole},
        {'type': 'response.output_item.done', 'output_index': index, 'item': done},
    ]


def _place(answer: Answer) -> JsonObject:
    """Returns the place of the open text."""
    index = answer.written.parts - 1
    return {'output_index': index, 'content_index': 0, 'item_id': f'msg_{answer.request_id}_{index}'}
