"""Shared by the dialects of conversations: wishes, tools, turns; and by OpenAI's two older routes: their requests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from areal_jax.columns import declared
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import bodies, sglang, vllm
from areal_jax.rollout.http.wire.encoding import frame, refuse
from areal_jax.rollout.http.wire.exchange import (
    Answer,
    Call,
    Message,
    Piece,
    Prompt,
    ReplyInfo,
    RequestError,
    Wish,
    count_usage,
)
from areal_jax.rollout.http.wire.reply import render_columns, render_npy

Required = Literal['refuse', 'wish']  # server.required
_TAKEN = "server.required='wish' takes it as a wish"


def call_wish(field: str, value: object, tool: str = '') -> Wish:
    """Makes the wish for a call of the tool with this name, or of any tool."""
    sentence = f'Answer with a call of the tool {tool}.' if tool else 'Answer with a call of one of the tools.'
    return Wish(field, value, 'call', sentence, f"must be 'auto' or 'none': a call can not be forced; {_TAKEN}", tool)


def json_wish(field: str, value: object, schema: JsonObject | None) -> Wish:
    """Makes the wish for a JSON object as the whole answer; the schema is shown to the model and not checked."""
    fits = '' if schema is None else f' that fits this JSON schema: {json.dumps(schema, ensure_ascii=False)}'
    sentence = f'Answer with a JSON object alone{fits or "."}'
    return Wish(field, value, 'json', sentence, f'is not served: answers are plain text; {_TAKEN}')


class PlainFormat(bodies.Body):
    """The format of an answer: text, or any JSON object."""

    type: Literal['text', 'json_object'] = 'text'


class JsonSchema(bodies.Body):
    """A JSON schema that the answer shall fit."""

    ignored = ('name', 'description', 'strict')
    shown: bodies.FreeObject | None = Field(None, alias='schema')


class SchemaFormat(JsonSchema):
    """A format with a schema."""

    type: Literal['json_schema']


class NestedFormat(bodies.Body):
    """A format with a schema, as OpenAI's chat writes it."""

    type: Literal['json_schema']
    json_schema: JsonSchema = bodies.OBJECT


_FORMATS = bodies.by('type', ('text', 'json_object', 'json_schema'), 'text', {'json_object': 'text'})
Format = Annotated[Annotated[PlainFormat, Tag('(text)')] | Annotated[SchemaFormat, Tag('(json_schema)')], _FORMATS]
ChatFormat = Annotated[Annotated[PlainFormat, Tag('(text)')] | Annotated[NestedFormat, Tag('(json_schema)')], _FORMATS]


def read_format(field: str, given: PlainFormat | SchemaFormat | NestedFormat | None) -> tuple[Wish, ...]:
    """Returns the wish for a format of the answer; () for plain text."""
    if given is None or given.type == 'text':
        return ()
    schema = given.json_schema if isinstance(given, NestedFormat) else given
    shown = schema.shown if isinstance(schema, JsonSchema) else None
    return (json_wish(field, given.sent, shown),)


def require_granted(call: Call, required: Required) -> None:
    """Raises RequestError for a call with a wish that is refused or can not be shown."""
    for wish in call.wishes:
        if required == 'refuse':
            raise refuse(wish.field, wish.value, wish.fix)
        if not all(isinstance(prompt, tuple) for prompt in call.prompts):
            raise refuse(wish.field, wish.value, 'can not be shown to the model in a prompt of ids: send messages')


def grant(call: Call, required: Required) -> Call:
    """Returns the call with its wishes in the prompt; raises RequestError as `require_granted` does."""
    require_granted(call, required)
    prompts = [show(prompt, call.wishes) if isinstance(prompt, tuple) else prompt for prompt in call.prompts]
    return dataclasses.replace(call, prompts=tuple(prompts)) if call.wishes else call


def show(messages: Sequence[Message], wishes: Sequence[Wish]) -> tuple[Message, ...]:
    """Returns the messages with a sentence for each wish, at the end of the system turn or in a new one."""
    said = describe_wishes(wishes)
    if not said:
        return tuple(messages)
    first, rest = messages[0], messages[1:]
    if first.role != 'system':
        return Message('system', said), *messages
    return dataclasses.replace(first, content=f'{first.content}\n\n{said}'), *rest


def describe_wishes(wishes: Sequence[Wish]) -> str:
    """Returns the sentences of the wishes for the model; '' without wishes."""
    return ' '.join(wish.sentence for wish in wishes)


def find_misses(call: Call, answers: Sequence[Answer]) -> list[str]:
    """Returns the fields whose wishes at least one of the answers misses."""
    return [wish.field for wish in call.wishes if not all(_is_met(wish, answer) for answer in answers)]


def _is_met(wish: Wish, answer: Answer) -> bool:
    if wish.kind == 'call':
        return any(wish.tool in ('', call.name) for call in answer.calls)
    if answer.calls and not answer.text:  # tool calls come first: the text belongs to a later turn
        return True
    try:
        return isinstance(json.loads(answer.text), dict)
    except (ValueError, RecursionError):
        return False


# Tools in OpenAI's chat: functions that a chat template shows to the model, and calls and results in the turns.


# fields of a tool that only other servers use
_IN_TOOLS = ('title', 'strict', 'cache_control', 'annotations', 'defer_loading', 'allowed_callers', 'input_examples')
Tools: TypeAlias = Annotated[list[bodies.One], Field(max_length=1024, fail_fast=True)]  # and calls of a turn


class Function(bodies.Body):
    """A function that the model may call."""

    ignored = _IN_TOOLS
    name: bodies.Name
    description: bodies.LongText = ''
    parameters: bodies.FreeObject | None = None

    def describe(self) -> JsonObject:
        """Returns the tool as chat templates show it: name, description and JSON schema, in the order as sent."""
        named = [(self.attributes.get(field, field), value) for field, value in self.sent.items()]
        shown = {name: value for name, value in named if name in ('name', 'description', 'parameters')}
        return {'type': 'function', 'function': shown}


class TypedTool(bodies.Body):
    type: Literal['function'] = 'function'


class Tool(TypedTool):
    """A tool of OpenAI's chat."""

    ignored = _IN_TOOLS
    function: Function = bodies.OBJECT


class NamedFunction(bodies.Body):
    name: bodies.Name


class NamedTool(bodies.Body):
    """The tool that must be called, as OpenAI's chat writes it."""

    type: Literal['function'] = 'function'
    function: NamedFunction = bodies.OBJECT


def _choose_form(value: object) -> str:
    return '(object)' if isinstance(value, dict) else '(word)'


WordOr: TypeAlias = Annotated[
    Annotated[Literal['auto', 'none', 'required'], Tag('(word)')] | Annotated[bodies.One, Tag('(object)')],
    Discriminator(_choose_form),
]


@dataclasses.dataclass(frozen=True)
class AskedTools:
    """A request's tools and its requirements on calls."""

    tools: tuple[JsonObject, ...] = ()  # shown to the model
    one_tool_call: bool = False
    wishes: tuple[Wish, ...] = ()


NO_TOOLS = AskedTools()


def choose(given: object, name: str, tools: Sequence[JsonObject], only_one: bool) -> AskedTools:
    """Applies `tool_choice`: auto, none, required, or another value that requires the tool `name`, '' = any."""
    if given == 'none':
        return NO_TOOLS
    if given in (None, 'auto'):
        return AskedTools(tuple(tools), only_one)
    if not tools:
        raise refuse('tool_choice', given, 'needs tools: send some, or leave it out')
    if name and all(tool['function']['name'] != name for tool in tools):
        raise refuse('tool_choice', given, 'names no tool of the request')
    return AskedTools(tuple(tools), only_one, (call_wish('tool_choice', given, name),))


class CalledFunction(bodies.Body):
    ignored = ('parsed_arguments',)  # added by the openai package
    name: bodies.Name
    arguments: bodies.Arguments


class Called(bodies.Body):
    """A call in a turn of the assistant."""

    ignored = ('index', 'cache_control', 'extra_content', 'provider_specific_fields')
    type: Literal['function'] = 'function'
    id: bodies.Text = ''
    function: CalledFunction = bodies.OBJECT


def describe_call(call_id: str, name: str, arguments: JsonObject | str) -> JsonObject:
    """Returns a call in the form that chat templates expect."""
    return {'id': call_id, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


class Part(bodies.Body):
    """A part of a message: text."""

    ignored = ('annotations', 'cache_control', 'citations', 'logprobs', 'prompt_cache_breakpoint')
    text: bodies.LongText = ''


class TextPart(Part):
    """A part of OpenAI's chat and of Anthropic's messages."""

    type: Literal['text'] = 'text'


Content: TypeAlias = bodies.OneOrList[bodies.LongText, TextPart]


def join_text(content: str | Sequence[Part]) -> str:
    """Returns the text of a message."""
    return content if isinstance(content, str) else ''.join(part.text for part in content)


# Shared by the other dialects of conversations: their requests become the same call as OpenAI's chat.


class Conversation(bodies.Sampling):
    """The fields of sampling and sending of a request."""

    request_id: bodies.Text = ''
    model: bodies.Text = ''
    stream: bool = False
    session_id: bodies.Text = ''
    cache_salt: bodies.Text = ''
    priority: bodies.Priority = 0


def make_call(
    request: Conversation,
    ignored: set[str],
    messages: Sequence[Message],
    prompt_field: str,
    max_new_tokens: int | None,
    asked: AskedTools,
    wishes: Sequence[Wish],
    stop_strings: Sequence[str] = (),
) -> Call:
    """Makes the call of a request for one answer to a conversation."""
    sampling = request.make(max_new_tokens)
    if stop_strings:
        sampling = dataclasses.replace(sampling, stop_strings=(*sampling.stop_strings, *stop_strings))
    without_influence = {'session_id': request.session_id, 'priority': request.priority}
    return Call(
        prompts=(tuple(messages),),
        prompt_field=prompt_field,
        sampling=(sampling,),
        request_ids=(request.request_id,),
        ignored=bodies.join_ignored(ignored, without_influence),
        model=request.model,
        stream=request.stream,
        tools=asked.tools,
        one_tool_call=asked.one_tool_call,
        wishes=(*asked.wishes, *wishes),
        session=request.session_id,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def join_assistant(messages: Sequence[Message]) -> list[Message]:
    """Joins a text of the assistant and its calls into one turn, if they came one by one."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last and last.role == message.role == 'assistant' and (last.tool_calls or message.tool_calls):
            found[-1] = Message('assistant', last.content + message.content, (*last.tool_calls, *message.tool_calls))
        else:
            found.append(message)
    return found


_NOT_TOLD = 'is not served: write the value into the template that model.chat_template names'
_LONGEST_NAME = 80  # characters of such a value's name that a sentence repeats
render_error = vllm.render_error


@dataclasses.dataclass(frozen=True)
class Route:
    """The names in which the two routes differ."""

    id_prefix: str
    reply: str  # value of `object` in a reply
    event: str  # and in an event


class Options(bodies.Body):
    """The object `stream_options`."""

    ignored = ('include_obfuscation', 'continuous_usage_stats')
    include_usage: bool = False


class Request(Conversation):
    """The fields that the two routes share."""

    ignored = (
        'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key', 'prompt_cache_retention',
        'detokenize', 'spaces_between_special_tokens', 'verbosity', 'reasoning_effort',
        'prediction',
    )  # fmt: skip
    n: bodies.Samples = 1
    prompt_logprobs: bodies.Alternatives | None = None
    stream_options: Options = bodies.OBJECT
    rid: bodies.Text = ''
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    chat_template_kwargs: Annotated[dict[str, object], Field(max_length=64)] = Field({})

    @classmethod
    def column_fields(cls) -> Mapping[str, bodies.ColumnField]:
        return bodies.ask_columns(declared())


def read_call(
    request: Request,
    ignored: set[str],
    prompts: Sequence[Prompt],
    prompt_field: str,
    max_new_tokens: int | None,
    wants_logprobs: bool,
    alternatives: int,
    asked: AskedTools = NO_TOOLS,
    wishes: Sequence[Wish] = (),
) -> Call:
    """Makes the call of a request of the two routes."""
    if request.return_meta_info and request.stream:
        raise refuse('return_meta_info', True, 'is not served with stream=true: leave one of them out')
    of_prompt, n = request.prompt_logprobs, request.n
    without_influence = {
        'session_id': request.session_id,
        'priority': request.priority,
        'chat_template_kwargs': request.chat_template_kwargs,
        'return_tokens_as_token_ids': request.return_tokens_as_token_ids and not wants_logprobs and of_prompt is None,
        'stream_options.include_usage': request.stream_options.include_usage and not request.stream,
    }
    return Call(
        prompts=tuple(prompts),
        prompt_field=prompt_field,
        sampling=(request.make(max_new_tokens),) * len(prompts),
        request_ids=bodies.number_ids(request.request_id or request.rid, len(prompts) * n),
        ignored=bodies.join_ignored(ignored, without_influence),
        tools=asked.tools,
        one_tool_call=asked.one_tool_call,
        wishes=(*asked.wishes, *wishes),
        template_values=tuple(request.chat_template_kwargs),
        model=request.model,
        n=n,
        is_batch=len(prompts) > 1,
        stream=request.stream,
        stream_usage=request.stream_options.include_usage,
        logprobs=wants_logprobs,
        columns=request.columns,
        alternatives=alternatives,
        prompt_logprobs=of_prompt,
        prompt_starts=() if of_prompt is None else (0,) * len(prompts),
        tokens_as_ids=request.return_tokens_as_token_ids,
        return_token_ids=request.return_token_ids,
        return_prompt_token_ids=request.return_prompt_token_ids or request.return_token_ids,
        return_meta_info=request.return_meta_info,
        session=request.session_id,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def render_reply(
    call: Call, answers: Sequence[Answer], info: ReplyInfo, route: Route, choices: Sequence[JsonObject]
) -> JsonObject:
    """Renders the reply around its choices."""
    return _envelope(call, answers[0], info, route, route.reply) | {
        'choices': list(choices),
        'usage': count_usage(call, answers),
        'metadata': metadata(answers[0]),
    }


def render_chunk(call: Call, answer: Answer, info: ReplyInfo, route: Route, choice: JsonObject) -> bytes:
    """Renders one event around its choice; the answer's last event has the versions."""
    event = _envelope(call, answer, info, route, route.event) | {'choices': [choice]}
    if answer.finish is not None:
        event['metadata'] = metadata(answer)
    return frame(event | {'usage': None} if call.stream_usage else event)


def render_usage(call: Call, answers: Sequence[Answer], info: ReplyInfo, route: Route) -> bytes:
    """Renders the event with the usage, if the call requests it."""
    if not call.stream_usage:
        return b''
    envelope = _envelope(call, answers[0], info, route, route.event)
    return frame(envelope | {'choices': [], 'usage': count_usage(call, answers)})


def render_choice(call: Call, answer: Answer, part: Answer, info: ReplyInfo, whole: bool) -> JsonObject:
    """Renders the fields of a choice that both routes share; `part` is the answer, or an event's part of it."""
    choice = render_end(call, answer)
    if call.return_token_ids:
        choice['token_ids'] = part.tokens.tolist()
    if call.return_prompt_token_ids and whole:
        choice['prompt_token_ids'] = answer.prompt_tokens.tolist()
    if call.return_meta_info:
        choice['meta_info'] = sglang.meta_info(call, answer, info)
    return choice | render_columns(call, part) | render_npy(call, part.pieces)


def render_end(call: Call, answer: Answer) -> JsonObject:
    """Renders a choice with the finish reason only."""
    choice: JsonObject = {'index': answer.index, 'finish_reason': _finish_word(answer), 'logprobs': None}
    return choice if answer.finish is None else choice | {'stop_reason': vllm.stop_reason(call, answer)}


def part_of(answer: Answer, piece: Piece) -> Answer:
    """Returns the piece as a separate answer."""
    return dataclasses.replace(answer, pieces=[piece])


def token_name(token: int, call: Call, info: ReplyInfo) -> str:
    """Returns the name of a token in log-probs."""
    if call.tokens_as_ids or info.token_text is None:
        return f'token_id:{token}'
    return info.token_text(token)


def render_models(info: ReplyInfo, context_tokens: int) -> JsonObject:
    """Renders GET /v1/models: the served model, with the context length, against which clients check prompts."""
    model = {'id': info.model, 'object': 'model', 'created': info.created_s, 'owned_by': 'areal_jax'}
    return {'object': 'list', 'data': [model | {'root': info.model, 'parent': None, 'max_model_len': context_tokens}]}


def require_unread(call: Call, reads: Callable[[str], bool]) -> None:
    """Raises RequestError for a value that the chat template reads: the prompt would be another one."""
    for name in call.template_values:
        if reads(name):
            sentence = (
                f'chat_template_kwargs has {name[:_LONGEST_NAME]!r}, which the chat template of this model looks at'
            )
            raise RequestError('chat_template_kwargs', f'{sentence}, and {_NOT_TOLD}')


def _envelope(call: Call, answer: Answer, info: ReplyInfo, route: Route, kind: str) -> JsonObject:
    request_id = answer.request_id if call.n_answers == 1 else answer.request_id.removesuffix(f'_{answer.index}')
    return {
        'id': f'{route.id_prefix}{request_id}',
        'object': kind,
        'created': info.created_s,
        'model': call.model or info.model,
    }


def metadata(answer: Answer) -> JsonObject:
    """Renders the versions of the weights that drew an answer and scored its prompt."""
    spans = answer.spans
    found: JsonObject = {
        'weight_version': answer.version or (spans[-1].version if spans else ''),
        'weight_versions': [{'version': span.version, 'start': span.start, 'end': span.end} for span in spans],
    }
    return found | {'scored_weight_version': answer.scored_version} if answer.scored_version else found


def _finish_word(answer: Answer) -> str | None:
    if answer.finish is None:
        return None
    return 'tool_calls' if answer.finish.reason == 'stop' and answer.calls else answer.finish.reason
