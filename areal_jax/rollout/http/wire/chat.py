"""OpenAI's POST /v1/chat/completions: request and reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeAlias

import pydantic
from pydantic import Field, Tag

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import bodies, openai
from areal_jax.rollout.http.wire.encoding import refuse
from areal_jax.rollout.http.wire.exchange import Answer, Call, Message, Piece, Prompt, ReplyInfo
from areal_jax.rollout.http.wire.vllm import ranked_alternatives, render_prompt_logprobs

_ROUTE = openai.Route('chatcmpl-', 'chat.completion', 'chat.completion.chunk')
render_error = openai.render_error


# fields that packages add to turns that they send back
_IN_TURNS = (
    'reasoning_content', 'reasoning', 'reasoning_details', 'thinking_blocks', 'annotations', 'cache_control', 'parsed',
    'provider_specific_fields',
)  # fmt: skip


class Turn(bodies.Body):
    """A turn of the system or of the user."""

    ignored = ('name', *_IN_TURNS)
    unserved = ('refusal', 'audio', 'function_call', 'tool_calls', 'tool_call_id')
    role: Literal['system', 'developer', 'user']
    content: openai.Content

    def read(self) -> Message:
        """Returns the turn, with the role that templates know."""
        return Message('system' if self.role == 'developer' else self.role, openai.join_text(self.content))


class AssistantTurn(bodies.Body):
    ignored = ('name', *_IN_TURNS)
    unserved = ('refusal', 'audio', 'function_call', 'tool_call_id')
    role: Literal['assistant']
    content: openai.Content | None = None
    tool_calls: openai.Tools[openai.Called] = Field([])

    @pydantic.model_validator(mode='after')
    def require_content(self) -> Self:
        """Raises the error for a turn without calls and content."""
        if self.content is None and not self.tool_calls:
            raise bodies.refusal('is missing: send a string or a list of text parts', field='content')
        return self

    def read(self) -> Message:
        calls = [openai.describe_call(one.id, one.function.name, one.function.arguments) for one in self.tool_calls]
        return Message('assistant', openai.join_text(self.content or ''), tuple(calls))


class ToolTurn(bodies.Body):
    """The result of a call."""

    ignored = _IN_TURNS
    unserved = ('refusal', 'audio', 'function_call', 'tool_calls')
    role: Literal['tool']
    content: openai.Content
    tool_call_id: bodies.Text = ''
    name: bodies.Text = ''

    def read(self) -> Message:
        return Message('tool', openai.join_text(self.content), (), self.tool_call_id, self.name)


_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
AnyTurn: TypeAlias = Annotated[
    Annotated[Turn, Tag('(system)')]
    | Annotated[AssistantTurn, Tag('(assistant)')]
    | Annotated[ToolTurn, Tag('(tool)')],
    bodies.by('role', _ROLES, same={'developer': 'system', 'user': 'system'}),
]
Messages: TypeAlias = bodies.Turns[AnyTurn]


class Request(openai.Request):
    unserved = (
        'functions', 'function_call', 'audio', 'web_search_options', 'echo', 'chat_template', 'structured_outputs',
        'continue_final_message',
    )  # fmt: skip
    messages: Messages | None = None
    input_ids: bodies.MaybeIds | None = None  # replace the messages
    max_completion_tokens: bodies.Positive | None = None
    max_tokens: bodies.Positive | None = None
    logprobs: bool = False
    top_logprobs: bodies.Alternatives = 0
    tools: openai.Tools[openai.Tool] = Field([])
    tool_choice: openai.WordOr[openai.NamedTool] = 'auto'
    parallel_tool_calls: bool = True
    response_format: openai.ChatFormat | None = None
    modalities: Annotated[list[Literal['text']], Field(min_length=1, max_length=1)] = Field(['text'])
    add_generation_prompt: bool = True


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    replaced: set[str] = set()
    if isinstance(body, dict) and body.get('input_ids') and body.get('messages') is not None:
        body, replaced = body | {'messages': None}, {'messages'}  # the ids are read in their place
    request, ignored = bodies.read(Request, body)
    prompt: Prompt | None = request.input_ids
    field = 'input_ids'
    if prompt is None or not len(prompt):
        prompt, field = read_turns(request.messages), 'messages'
    if request.top_logprobs and not request.logprobs:
        raise refuse('top_logprobs', request.top_logprobs, 'needs logprobs=true')
    require_answer(request.add_generation_prompt)
    asked = read_tools(request.tools, request.tool_choice, not request.parallel_tool_calls)
    wishes = openai.read_format('response_format', request.response_format)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    call = openai.read_call(
        request, ignored | replaced, (prompt,), field, limit, request.logprobs, request.top_logprobs, asked, wishes
    )
    bodies.require_scored(call, 'max_tokens', 'top_logprobs')
    return call


def read_turns(messages: Messages | None) -> tuple[Message, ...]:
    """Returns the turns of a conversation; raises RequestError without messages."""
    if messages is None:
        raise refuse('messages', None, 'must be a list of one or more messages')
    return tuple(turn.read() for turn in messages)


def read_tools(
    tools: Sequence[openai.Tool], choice: str | openai.NamedTool, only_one: bool = False
) -> openai.AskedTools:
    """Returns the functions that the model may call; none with tool_choice='none'."""
    given, name = (choice, '') if isinstance(choice, str) else (choice.sent, choice.function.name)
    return openai.choose(given, name, [tool.function.describe() for tool in tools], only_one)


def require_answer(adds_prompt: bool) -> None:
    """Raises RequestError for a conversation without the beginning of an answer."""
    if not adds_prompt:
        raise refuse('add_generation_prompt', False, 'is not served: conversations end where an answer begins')


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply, with a choice for each of the n answers."""
    choices = []
    for answer in answers:
        choice = _render_choice(call, answer, answer, info, whole=True)
        if call.return_token_ids:
            choice['response_token_ids'] = choice['token_ids']
        choices.append(choice | {'message': _render_message(answer)})
    reply = openai.render_reply(call, answers, info, _ROUTE, choices)
    if call.prompt_logprobs is not None:
        reply['prompt_logprobs'] = render_prompt_logprobs(call, answers[0], info)
    if call.return_prompt_token_ids:
        reply['prompt_token_ids'] = answers[0].prompt_tokens.tolist()
    return reply


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the events of `piece`, the answer's last: one with its text and tokens, and two for each call.

    The first event of an answer names the role, the last one the finish reason.
    """
    first = answer.n_tokens == len(piece.tokens)
    delta: JsonObject = {'role': 'assistant'} if first else {}
    if piece.reasoning:
        delta['reasoning_content'] = piece.reasoning
    if piece.text or not call.tools:
        delta['content'] = piece.text
    deltas = [delta, *_render_deltas(answer, piece)]
    ongoing = dataclasses.replace(answer, finish=None)
    frames = []
    for index, one in enumerate(deltas):
        so_far = ongoing if one is not deltas[-1] else answer
        choice = openai.render_end(call, so_far)
        if not index:
            choice = _render_choice(call, so_far, openai.part_of(so_far, piece), info, whole=first)
        frames.append(openai.render_chunk(call, so_far, info, _ROUTE, choice | {'delta': one}))
    return b''.join(frames)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Renders the bytes after the last event of the last answer, before [DONE]."""
    return openai.render_usage(call, answers, info, _ROUTE)


def _render_message(answer: Answer) -> JsonObject:
    """Renders the message; its content is null if the answer consists of calls alone."""
    message: JsonObject = {'role': 'assistant', 'content': answer.text}
    if answer.calls:
        message = {'role': 'assistant', 'content': answer.text or None}
        message['tool_calls'] = [openai.describe_call(call.id, call.name, call.arguments) for call in answer.calls]
    return message | {'reasoning_content': answer.reasoning} if answer.reasoning else message


def _render_deltas(answer: Answer, piece: Piece) -> list[JsonObject]:
    """Renders two deltas for each call of the answer's last piece: its name, and its arguments."""
    found: list[JsonObject] = []
    for index, call in enumerate(piece.calls, start=len(answer.calls) - len(piece.calls)):
        named, filled = openai.describe_call(call.id, call.name, ''), {'function': {'arguments': call.arguments}}
        found += [{'tool_calls': [{'index': index} | one]} for one in (named, filled)]
    return found


def _render_choice(call: Call, answer: Answer, part: Answer, info: ReplyInfo, whole: bool) -> JsonObject:
    choice = openai.render_choice(call, answer, part, info, whole)
    if call.logprobs:
        pairs = zip(part.tokens.tolist(), part.logprobs.tolist(), strict=True)
        tops = ranked_alternatives(call, answer, len(part.tokens))
        name = lambda token: openai.token_name(token, call, info)
        content = [
            _entry(name(token), logprob) | {'top_logprobs': [_entry(name(other), value) for other, value in top]}
            for (token, logprob), top in zip(pairs, tops, strict=True)
        ]
        choice['logprobs'] = {'content': content, 'refusal': None}
    return choice


def _entry(name: str, logprob: float) -> JsonObject:
    """Renders an entry of log-probs; `bytes` is null for a token that is only a part of a character."""
    return {
        'token': name,
        'bytes': None if '\ufffd' in name else list(name.encode()),
        'logprob': logprob,
    }
