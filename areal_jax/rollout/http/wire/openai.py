"""Shared parts of OpenAI's two routes: sampling, fields without a meaning here, errors, the list of models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import sglang, vllm
from areal_jax.rollout.http.wire.exchange import (
    Answer,
    Call,
    CallSampling,
    Message,
    Piece,
    Prompt,
    ReplyInfo,
    RequestError,
    Wish,
    count_usage,
    read_wanted,
    render_columns,
)
from areal_jax.rollout.http.wire.request_fields import MOST_LEVELS, OPENAI, Fields, count_levels, read_sampling, refuse
from areal_jax.rollout.http.wire.row_fields import render_npy
from areal_jax.rollout.http.wire.sglang import frame
from areal_jax.types import MOST_ALTERNATIVES

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


def read_format(fields: Fields, field: str, nested: bool = False) -> tuple[Wish, ...]:
    """Takes the format of the answer: () for plain text.

    Args:
      nested: name, schema and strict of json_schema are in an object of that name.
    """
    given = fields.take(field)
    if given is None:
        return ()
    inside = fields.inside(given, field)
    kind = inside.take_choice('type', ('text', 'json_object', 'json_schema'))
    schema = None
    if kind == 'json_schema':
        inner = inside.take_fields('json_schema') if nested else inside
        inner.take_ignored('name', 'description', 'strict')
        found = inner.take('schema', type='object')
        if found is not None and not isinstance(found, dict):
            raise inner.refuse('schema', found, 'must be a JSON schema')
        inner.require_shallow('schema', found)
        schema = found
        if nested:
            inner.finish()
    inside.finish()
    return () if kind == 'text' else (json_wish(fields.name(field), given, schema),)


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


_MOST_TOOLS = 1024  # of a request, and calls in one turn
# fields of a tool that only other servers use
_IGNORED = ('title', 'strict', 'cache_control', 'annotations', 'defer_loading', 'allowed_callers', 'input_examples')


@dataclasses.dataclass(frozen=True)
class AskedTools:
    """A request's tools and its requirements on calls."""

    tools: tuple[JsonObject, ...] = ()  # shown to the model
    one_tool_call: bool = False
    wishes: tuple[Wish, ...] = ()


def read_tools(fields: Fields) -> AskedTools:
    """Reads the functions that the model may call, without ignored fields; none with tool_choice='none'."""
    only_one = not fields.take_flag('parallel_tool_calls', True)
    tools = tuple(_read_tool(entry) for entry in list_tools(fields))
    given = fields.take('tool_choice')
    word, name = _read_choice(fields, given)
    return choose(fields, given, word, name, tools, only_one)


def list_tools(fields: Fields) -> list[Fields]:
    """Lists the entries of `tools`, [] if it is absent."""
    given = fields.take('tools')
    given = [] if given is None else given
    if not isinstance(given, list):
        raise fields.refuse('tools', given, 'must be a list of functions')
    fields.require_few('tools', given, _MOST_TOOLS)
    return [fields.inside(entry, f'tools[{index}]') for index, entry in enumerate(given)]


def read_function(function: Fields, parameters: str = 'parameters') -> JsonObject:
    """Reads a function as templates show it: name, description and JSON schema, in the order as sent."""
    order = [name for name in function.names() if name in ('name', 'description', parameters)]
    function.take_ignored(*_IGNORED)
    schema = function.peek(parameters)
    function.require_shallow(parameters, schema)
    values = {'name': take_name(function), 'description': function.take_text('description', longest=None)}
    function.take_fields(parameters)  # a JSON schema, for the model to read
    function.finish()
    return {'parameters' if name == parameters else name: values.get(name, schema) for name in order}


def choose(
    fields: Fields, given: object, word: str, name: str, tools: tuple[JsonObject, ...], only_one: bool
) -> AskedTools:
    """Applies `tool_choice`, sent as `given`: `word` is auto, none or required, `name` is the required tool's."""
    if word == 'none':
        return AskedTools()
    if word == 'auto':
        return AskedTools(tools, only_one)
    if not tools:
        raise fields.refuse('tool_choice', given, 'needs tools: send some, or leave it out')
    if name and all(tool['function']['name'] != name for tool in tools):
        raise fields.refuse('tool_choice', given, 'names no tool of the request')
    return AskedTools(tools, only_one, (call_wish(fields.name('tool_choice'), given, name),))


def read_calls(message: Fields) -> tuple[JsonObject, ...]:
    """Reads the calls in a turn of the assistant."""
    given = message.take('tool_calls')
    given = [] if given is None else given
    if not isinstance(given, list):
        raise message.refuse('tool_calls', given, 'must be a list of calls')
    message.require_few('tool_calls', given, _MOST_TOOLS)
    return tuple(_read_call(message.inside(entry, f'tool_calls[{i}]')) for i, entry in enumerate(given))


def describe_call(call_id: str, name: str, arguments: JsonObject | str) -> JsonObject:
    """Returns a call in the form that chat templates expect."""
    return {'id': call_id, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def take_name(function: Fields) -> str:
    name = function.take_text('name')
    if not name:
        raise function.refuse('name', name, 'is missing: name the function')
    return name


def take_arguments(function: Fields) -> JsonObject | str:
    """Reads arguments as the object that templates expect; a string that is no JSON object stays a string."""
    given = function.take('arguments')
    if isinstance(given, str):
        function.require_characters('arguments', given)
        try:
            value = json.loads(given or '{}')
        except (ValueError, RecursionError):
            return given
        return value if isinstance(value, dict) and count_levels(value) <= MOST_LEVELS else given
    if not isinstance(given, dict):
        raise function.refuse('arguments', given, 'must be a string, with a JSON object in it')
    function.require_shallow('arguments', given)
    return given


def _read_tool(fields: Fields) -> JsonObject:
    fields.take_choice('type', ('function',))
    fields.take_ignored(*_IGNORED)
    function = read_function(fields.take_fields('function'))
    fields.finish()
    return {'type': 'function', 'function': function}


def _read_choice(fields: Fields, given: object) -> tuple[str, str]:
    """Returns ('auto', 'none' or 'required', name of a function)."""
    if given is None or given in ('auto', 'none', 'required'):
        return str(given or 'auto'), ''
    if not isinstance(given, Mapping):
        raise fields.refuse('tool_choice', given, "must be 'auto', 'none', 'required' or a function")
    inside = fields.inside(given, 'tool_choice')
    inside.take_choice('type', ('function',))
    name = take_name(inside.take_fields('function'))
    inside.finish()
    return 'required', name


def _read_call(fields: Fields) -> JsonObject:
    fields.take_choice('type', ('function',))
    call_id, function = fields.take_text('id'), fields.take_fields('function')
    name, arguments = take_name(function), take_arguments(function)
    function.take_ignored('parsed_arguments')  # added by the openai package
    function.finish()
    fields.take_ignored('index', 'cache_control', 'extra_content', 'provider_specific_fields')
    fields.finish()
    return describe_call(call_id, name, arguments)


# Shared by the other dialects of conversations: their requests become the same call as OpenAI's chat.


def make_call(
    fields: Fields,
    messages: Sequence[Message],
    prompt_field: str,
    max_new_tokens: int | None,
    asked: AskedTools,
    wishes: Sequence[Wish],
    stop_strings: Sequence[str] = (),
) -> Call:
    """Takes the fields of sampling and sending, and refuses the remaining ones. One answer, to a conversation."""
    sampling = read_sampling(fields, OPENAI, max_new_tokens)
    if stop_strings:
        sampling = dataclasses.replace(sampling, stop_strings=(*sampling.stop_strings, *stop_strings))
    call = Call(
        prompts=(tuple(messages),),
        prompt_field=prompt_field,
        sampling=(sampling,),
        request_ids=(fields.take_text('request_id'),),
        model=fields.take_text('model'),
        stream=fields.take_flag('stream'),
        tools=asked.tools,
        one_tool_call=asked.one_tool_call,
        wishes=(*asked.wishes, *wishes),
        session=fields.take_text('session_id'),
        cache_salt=fields.take_text('cache_salt'),
        priority=fields.take_integer('priority', 0, least=-(2**31)),
    )
    fields.note_ignored(session_id=call.session, priority=call.priority)
    fields.finish()
    return dataclasses.replace(call, ignored=fields.ignored)


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


_MOST_SAMPLES = 1024  # n: bounds the answers of one body
_MOST_MESSAGES = 4096  # and parts of a message
_MOST_VALUES = 64  # for a chat template
_NOT_TOLD = 'is not served: write the value into the template that model.chat_template names'
_LONGEST_NAME = 80  # characters of such a value's name that a sentence repeats
_OPENAI_IGNORED = (
    'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key', 'prompt_cache_retention',
    'detokenize', 'spaces_between_special_tokens', 'verbosity', 'reasoning_effort',
    'prediction',
)  # fmt: skip
# fields that packages add to turns that they send back
_IGNORED_IN_MESSAGES = (
    'reasoning_content', 'reasoning', 'reasoning_details', 'thinking_blocks', 'annotations', 'cache_control', 'parsed',
    'provider_specific_fields',
)  # fmt: skip

render_error = vllm.render_error


@dataclasses.dataclass(frozen=True)
class Route:
    """The names in which the two routes differ."""

    id_prefix: str
    reply: str  # value of `object` in a reply
    event: str  # and in an event


def read_call(
    fields: Fields,
    prompts: tuple[Prompt, ...],
    prompt_field: str,
    max_new_tokens: int | None,
    wants_logprobs: bool,
    alternatives: int,
) -> Call:
    """Takes the fields that the two routes share, and refuses the remaining ones."""
    of_prompt = fields.take_optional_integer('prompt_logprobs', least=0, most=MOST_ALTERNATIVES)
    n = fields.take_integer('n', 1, least=1, most=_MOST_SAMPLES)
    sampling: CallSampling = read_sampling(fields, OPENAI, max_new_tokens)
    stream = fields.take_flag('stream')
    options = fields.take_fields('stream_options')
    usage = options.take_flag('include_usage')
    options.take_ignored('include_obfuscation', 'continuous_usage_stats')
    options.finish()
    total, request_id = len(prompts) * n, fields.take_text('request_id') or fields.take_text('rid')
    ids = (request_id,) if total == 1 else tuple(f'{request_id}_{i}' if request_id else '' for i in range(total))
    return_ids, template_values = fields.take_flag('return_token_ids'), _read_template_values(fields)
    call = Call(
        prompts=prompts,
        prompt_field=prompt_field,
        sampling=(sampling,) * len(prompts),
        request_ids=ids,
        model=fields.take_text('model'),
        n=n,
        is_batch=len(prompts) > 1,
        stream=stream,
        stream_usage=usage,
        logprobs=wants_logprobs,
        columns=read_wanted(fields.take_flag),
        alternatives=alternatives,
        prompt_logprobs=of_prompt,
        prompt_starts=() if of_prompt is None else (0,) * len(prompts),
        tokens_as_ids=fields.take_flag('return_tokens_as_token_ids'),
        return_token_ids=return_ids,
        return_prompt_token_ids=fields.take_flag('return_prompt_token_ids') or return_ids,
        return_meta_info=_read_meta(fields, stream),
        session=fields.take_text('session_id'),
        cache_salt=fields.take_text('cache_salt'),
        priority=fields.take_integer('priority', 0, least=-(2**31)),
    )
    fields.take_ignored(*_OPENAI_IGNORED)
    fields.note_ignored(
        session_id=call.session,
        priority=call.priority,
        return_tokens_as_token_ids=call.tokens_as_ids and not wants_logprobs and of_prompt is None,
    )
    options.note_ignored(include_usage=usage and not stream)
    fields.finish()
    return dataclasses.replace(call, ignored=fields.ignored, template_values=template_values)


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """Reads the turns of a conversation, at least one."""
    given = fields.take('messages')
    if not isinstance(given, list) or not given:
        raise fields.refuse('messages', given, 'must be a list of one or more messages')
    fields.require_few('messages', given, _MOST_MESSAGES)
    return tuple(_read_message(fields.inside(entry, f'messages[{index}]')) for index, entry in enumerate(given))


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


def _read_template_values(fields: Fields) -> tuple[str, ...]:
    """Reads the names of values for the template: the server refuses names that it reads (require_unread)."""
    values = fields.take('chat_template_kwargs', type='object')
    if values is None:
        return ()
    if not isinstance(values, dict):
        raise fields.refuse('chat_template_kwargs', values, 'must be a JSON object')
    fields.require_few('chat_template_kwargs', values, _MOST_VALUES)
    fields.note_ignored(chat_template_kwargs=values)
    return tuple(values)


def require_unread(call: Call, reads: Callable[[str], bool]) -> None:
    """Raises RequestError for a value that the chat template reads: the prompt would be another one."""
    for name in call.template_values:
        if reads(name):
            sentence = (
                f'chat_template_kwargs has {name[:_LONGEST_NAME]!r}, which the chat template of this model looks at'
            )
            raise RequestError('chat_template_kwargs', f'{sentence}, and {_NOT_TOLD}')


def _read_meta(fields: Fields, stream: bool) -> bool:
    wanted = fields.take_flag('return_meta_info')
    if wanted and stream:
        raise fields.refuse('return_meta_info', wanted, 'is not served with stream=true: leave one of them out')
    return wanted


def _read_message(fields: Fields) -> Message:
    role = fields.take_choice('role', ('system', 'developer', 'user', 'assistant', 'tool'), default='')
    if not role:
        raise fields.refuse('role', None, "is missing: use 'system', 'user', 'assistant' or 'tool'")
    calls = read_calls(fields) if role == 'assistant' else ()
    if isinstance(content := fields.peek('content'), list):
        fields.require_few('content', fields.take('content'), _MOST_MESSAGES)
        text = ''.join(read_part(fields.inside(part, f'content[{i}]')) for i, part in enumerate(content))
    elif content is None and not calls:
        raise fields.refuse('content', None, 'is missing: send a string or a list of text parts')
    else:
        text = fields.take_text('content', longest=None)
    answers = (fields.take_text('tool_call_id'), fields.take_text('name')) if role == 'tool' else ('', '')
    fields.take_unserved('refusal', 'audio', 'function_call', 'tool_calls', 'tool_call_id')
    fields.take_ignored('name', *_IGNORED_IN_MESSAGES)
    fields.finish()
    return Message('system' if role == 'developer' else role, text, calls, *answers)  # templates know the older name


def read_part(fields: Fields, kinds: Sequence[str] = ('text',)) -> str:
    """Reads the text of a message's part, which must have one of these types."""
    fields.take_choice('type', kinds)
    text = fields.take_text('text', longest=None)
    fields.take_ignored('annotations', 'cache_control', 'citations', 'logprobs', 'prompt_cache_breakpoint')
    fields.finish()
    return text


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


def token_ids_prompt(fields: Fields, field: str) -> np.ndarray | None:
    """Reads a prompt of ids, which replaces a template; None = not given."""
    ids = fields.take_token_ids(field)
    return np.array(ids, np.int32) if ids else None
