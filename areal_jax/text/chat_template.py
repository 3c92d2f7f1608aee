"""Chat templates: from the messages of a conversation to the text of its prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from areal_jax.errors import UserError, show
from areal_jax.files import JsonObject
from areal_jax.text.template_worker import TemplateWorker

Messages = Sequence[Mapping[str, object]]  # {'role': 'system' | 'user' | 'assistant' | 'tool', 'content': text, ...}
Tools = Sequence[JsonObject]  # {'type': 'function', 'function': {'name': ..., ...}}, as OpenAI's chat has them

_LARGEST_SOURCE = 2**18  # characters; the templates of known models have less than 2**15
# Limits of the output in characters: per call, per conversation, and per character of the messages.
_CHARACTERS, _CHARACTERS_EACH, _CHARACTERS_PER_CHARACTER = 2**20, 2**14, 16
_LARGE = 2**16  # characters of a conversation with its tools
_MEMORY_BYTES = 2**30  # in addition to input and output, which are bounded above
_CPU_SECONDS, _CONVERSATIONS_PER_CPU_SECOND = 10, 500  # one takes about 50 microseconds
_WALL_SECONDS_PER_CPU_SECOND = 30  # the process may have to wait for the CPU


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be built, or that does not fit its text or its model."""


class ConversationError(TokenizerError):
    """Raised for the first of several conversations that has no prompt.

    `index` is its place among them.
    """

    def __init__(self, index: int, message: str):
        super().__init__(message)
        self.index = index


@dataclasses.dataclass(frozen=True)
class GivenTemplate:
    """A template in place of the one that came with the weights. Producer: app/model/text_model.py."""

    source: str  # in jinja2
    place: str  # where it comes from, for errors


class ChatTemplate:
    """A jinja2 template that came with the weights, from outside.

    It runs in jinja2's sandbox, in a process that the first call of `render` starts and later calls reuse;
    TemplateWorker describes its end. A call has at most `cpu_seconds` of CPU time plus one second for every 500
    conversations, 1 GiB of memory in addition to its input and output, and an output of 2**20 characters plus, for each
    conversation, 2**14 and 16 times the length of its messages. So a template that loops, allocates or recurses without
    end costs seconds and an error, never this process. The first call takes about 0.1 s, a conversation about 50
    microseconds.

    Args:
      source: of the template, in jinja2.
      values: its variables in addition to messages and add_generation_prompt=True, e.g. bos_token; JSON-able.
      place: the file that it comes from, for errors.
      day: the date of its `strftime_now`: '2026-11-30', or 'off' = it has no such function; '' = the present time.
      with_tools: another template, for conversations with tools.

    Raises TokenizerError for a source that cannot be parsed.
    """

    def __init__(
        self,
        source: object,
        values: JsonObject,
        place: str,
        cpu_seconds: float = _CPU_SECONDS,
        *,
        day: str = '',
        with_tools: ChatTemplate | None = None,
    ):
        self._values, self._place, self._cpu_seconds, self._day = dict(values), place, cpu_seconds, day
        if not isinstance(source, str):
            raise TokenizerError(f'{place}: the chat template is a {type(source).__name__}, not a text')
        if len(source) > _LARGEST_SOURCE:
            raise TokenizerError(
                f'{place}: the chat template has {len(source)} characters, more than {_LARGEST_SOURCE}; is it one?'
            )
        self.source, self._with_tools = source, with_tools
        names, variables = _parse(source, place)
        # all names that it, or the template for tools, looks at
        self.names: frozenset[str] = names if with_tools is None else names | with_tools.names
        self.takes_tools: bool = 'tools' in variables if with_tools is None else with_tools.takes_tools
        self._workers = [TemplateWorker(source), TemplateWorker(source)]  # of usual requests, and of large ones

    def render(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[str]:
        """Renders the prompt of each conversation, up to where the answer begins; threads take turns.

        Raises ConversationError.
        """
        if not conversations:
            return []
        if tools and self._with_tools is not None:
            return self._with_tools.render(conversations, tools)
        messages = [[dict(message) for message in conversation] for conversation in conversations]
        values = self._values | ({'tools': list(tools)} if tools else {})
        try:
            request = {'conversations': messages, 'values': values, 'day': self._day, **self._bound(messages, tools)}
            replies, ended = self._find_worker(request).render(request)
        except RecursionError as error:
            raise ConversationError(0, 'the messages or tools are nested too deep: leave out some levels') from error
        texts = [reply['text'] for reply in replies if 'text' in reply]
        if len(texts) == len(conversations):
            return texts
        reason = replies[-1].get('error', '') if replies else ''
        reason = reason.rstrip('.') or ended
        raise ConversationError(
            len(texts), f'{self._place}: the chat template gives no prompt: {reason}. Use the template of the model'
        )

    def close(self) -> None:
        """Ends the process; a later call of `render` starts a new one."""
        for worker in self._workers:
            worker.close()
        if self._with_tools is not None:
            self._with_tools.close()

    @property
    def written(self) -> str:
        """All that it may write in addition to its values: its source, and the source of the template for tools."""
        return self.source if self._with_tools is None else self.source + self._with_tools.source

    def _find_worker(self, request: JsonObject) -> TemplateWorker:
        """Returns the worker for a request: a large conversation has its worker, so that others do not wait for it."""
        is_large = len(request['conversations']) == 1 and request['length'] > _LARGE
        if self._workers[is_large].owner != os.getpid():  # this is a fork, and the process is its parent's
            self._workers[is_large] = TemplateWorker(self.source)
        return self._workers[is_large]

    def _bound(self, conversations: Sequence[Messages], tools: Tools) -> dict[str, float]:
        """The limits of a call."""
        length = sum(len(str(text)) for messages in conversations for m in messages for text in m.values())
        length += len(conversations) * len(str(tools))
        characters = _CHARACTERS + _CHARACTERS_EACH * len(conversations) + _CHARACTERS_PER_CHARACTER * length
        cpu_seconds = self._cpu_seconds + len(conversations) // _CONVERSATIONS_PER_CPU_SECOND
        return {
            'length': length,
            'characters': characters,
            'memory_bytes': _MEMORY_BYTES + 16 * length + 4 * characters,
            'cpu_seconds': cpu_seconds,
            'wall_seconds': cpu_seconds * _WALL_SECONDS_PER_CPU_SECOND,
        }


def _parse(source: str, place: str) -> tuple[frozenset[str], frozenset[str]]:
    """Returns (all names in the template, also attributes and texts; its variables). Raises TokenizerError."""
    from jinja2 import TemplateSyntaxError, nodes

    from areal_jax.text.template_renderer import make_environment

    try:
        # Parsing evaluates nothing. Compiling would: jinja2 computes constant expressions.
        tree = make_environment().parse(source)
        variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == 'load')
        attributes = (one.attr for one in tree.find_all(nodes.Getattr))
        texts = (one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, str))
        return variables.union(attributes, texts), variables
    except TemplateSyntaxError as error:
        raise TokenizerError(f'{place}: the chat template cannot be read: line {error.lineno}: {error}') from error
    except RecursionError as error:
        raise TokenizerError(f'{place}: the chat template cannot be read: it is nested too deep') from error


# Messages of OpenAI's chat as chat templates expect them: a text as content, and arguments of calls as objects.


Message = Mapping[str, object]


def for_template(messages: Messages) -> list[dict[str, object]]:
    """Makes messages fit templates: arguments in JSON become objects, other strings stay; no content becomes ''."""
    return [_with_objects(message) for message in messages]


def read_arguments(arguments: object) -> object:
    """Parses the JSON in a text of arguments; returns anything else unchanged."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(arguments)
    return arguments


def _with_objects(message: Message) -> dict[str, object]:
    calls = message.get('tool_calls')
    own = {**message, 'content': message.get('content') or ''}
    return {**own, 'tool_calls': [_with_object(call) for call in calls]} if isinstance(calls, list) else own


def _with_object(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get('function'), Mapping):
        return call
    return {**call, 'function': {**function, 'arguments': read_arguments(function.get('arguments'))}}


# The text that a chat template writes after an answer: it continues a conversation without changing the sampled ids.
#
# The text is the difference of two renderings of a short conversation (template difference). It holds for every
# conversation if the template writes each turn independently of the turns around it, which is tried out first.


_QUESTION = {'role': 'user', 'content': 'x'}
# A template that removes the reasoning from earlier answers changes the second one.
_ANSWER, _REASONED = 'y', '<think>\ny\n</think>\n\ny'
# No form writes its content by chance; the ids of Mistral's calls have nine characters.
_RESULT = {'role': 'tool', 'content': 'zq7zq', 'name': 'z', 'tool_call_id': 'zzzzzzzzz'}
_MOST_KNOWN = 64  # sets of tools and kinds of messages whose test is remembered


def can_extend(messages: Messages) -> bool:
    """Whether the messages are results of tools, then at most one message of the user."""
    roles = [message.get('role') for message in messages]
    results = roles[:-1] if roles[-1:] == ['user'] else roles
    return all(role == 'tool' for role in results)


class Extension:
    """The texts that follow an answer in one template; thread-safe."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: dict[tuple[str, bool, bool], str | None] = {}  # the rendering before the text; None = unstable

    def render(self, messages: Messages, tools: Tools) -> str | None:
        """Returns the text after an answer: the close of its turn, the messages, and the opening of the next answer.

        None for messages that cannot follow an answer, and if the template does not write a conversation as the shorter
        one and such a text, because it refuses the messages, changes earlier turns, or moves the tools.
        """
        if not can_extend(messages):
            return None
        kind = any(m['role'] == 'tool' for m in messages), any(m['role'] == 'user' for m in messages)
        key = (json.dumps(tools), *kind)
        if key not in self._known:
            before = self._find_stable(kind, tools)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = before
        before = self._known.get(key)
        whole = None if before is None else self._try_render([[_QUESTION, _answer(_ANSWER), *messages]], tools)
        if before is None or whole is None or not whole[0].startswith(before):
            return None
        return whole[0][len(before) :]

    def _find_stable(self, kind: tuple[bool, bool], tools: Tools) -> str | None:
        """The rendering before the text that follows the answer; None for an unstable template."""
        has_results, has_question = kind
        then = [_RESULT] * 2 * has_results + [_QUESTION] * has_question
        rounds = [[_answer(text), *then] for text in (_ANSWER, _REASONED)]
        conversations = [[_QUESTION], *([_QUESTION, *turns * count] for turns in rounds for count in (1, 2))]
        found = self._try_render(conversations, tools)
        if found is None:
            return None
        opened, once, twice, once_reasoned, twice_reasoned = found
        text = once[len(opened) + len(_ANSWER) :]
        pieces = [opened, _ANSWER, text, _ANSWER, text]
        reasoned = [_REASONED if piece == _ANSWER else piece for piece in pieces]
        same = [''.join(part) for part in (pieces[:3], pieces, reasoned[:3], reasoned)]
        return opened + _ANSWER if same == [once, twice, once_reasoned, twice_reasoned] else None

    def _try_render(self, conversations: Sequence[Messages], tools: Tools) -> list[str] | None:
        try:
            return self._template.render(conversations, tools)
        except ConversationError:
            return None


def _answer(text: str) -> dict[str, str]:
    return {'role': 'assistant', 'content': text}


# Tools are shown to the model or refused: one check, for every entry point where a conversation becomes a prompt.
#
# The entry points are the routes of areal-serve and of the gateway, agents, environments and data of supervised
# training (tests/text/test_shown_tools.py lists them). A template that has no place for tools silently leaves them out,
# and the model would be trained or asked without them.


REMEDY = "name one that shows them in model.chat_template, 'package:configs/templates/hermes.jinja' for ChatML models"
NO_PLACE = f'is not shown to the model: the chat template of this model has no place for tools; {REMEDY}'
_LEFT_OUT = f'is not shown to the model: the chat template of this model leaves its name out here; {REMEDY}'


class ToolsNotShownError(ConversationError):
    """Raised for the first of several conversations of which the chat form hides a part from the model.

    `field` names the part as requests do, 'tools' or 'messages[1].tool_calls'; `value` is its content.
    """

    def __init__(self, index: int, field: str, value: object, reason: str):
        super().__init__(index, f'{field}={show(value)} {reason}')
        self.field, self.value, self.reason = field, value, reason


class ChatForm(Protocol):
    """The properties of a tokenizer that the check reads."""

    @property
    def takes_tools(self) -> bool: ...

    @property
    def shows_results(self) -> bool: ...


def require_shown(form: ChatForm, conversations: Sequence[Messages], tools: Tools) -> None:
    """Raises ToolsNotShownError for tools, calls, and results of tools that the chat form of a model does not show."""
    if form.takes_tools:
        return  # if a prompt still lacks a name, `require_names` refuses it
    has_results = any(message.get('role') == 'tool' for messages in conversations for message in messages)
    require_place(conversations, tools, shows_results=has_results and form.shows_results)


def require_place(conversations: Sequence[Messages], tools: Tools, *, shows_results: bool = False) -> None:
    """Raises ToolsNotShownError for a chat form without a place for tools; `shows_results` allows results of tools."""
    if tools and conversations:
        raise ToolsNotShownError(0, 'tools', list(tools), NO_PLACE)
    for index, messages in enumerate(conversations):
        for number, message in enumerate(messages):
            if calls := message.get('tool_calls'):
                raise ToolsNotShownError(index, f'messages[{number}].tool_calls', calls, NO_PLACE)
            if message.get('role') == 'tool' and not shows_results:
                raise ToolsNotShownError(index, f'messages[{number}].role', message['role'], NO_PLACE)


def shows_results(template: ChatTemplate) -> bool:
    """Whether a template writes the content of a turn of the role 'tool': it is tried out."""
    try:
        [text] = template.render([[_QUESTION, _answer(_ANSWER), _RESULT]])
    except ConversationError:
        return False
    return _RESULT['content'] in text


def require_names(texts: Sequence[str], conversations: Sequence[Messages], tools: Tools) -> None:
    """Raises ToolsNotShownError if a prompt of a chat form with tools lacks the name of a tool or of a call.

    This finds a template that reads the tools but shows them only under a condition, e.g. to the first user.
    """
    for index, (text, messages) in enumerate(zip(texts, conversations, strict=True)):
        for field, value, name in _list_names(messages, tools):
            if not any(spelled in text for spelled in (name, json.dumps(name)[1:-1])):
                raise ToolsNotShownError(index, field, value, _LEFT_OUT)


def _list_names(messages: Messages, tools: Tools) -> Iterator[tuple[str, object, str]]:
    """Yields (field, its value, name of the function) for each tool and each call that has a name."""
    for number, tool in enumerate(tools):
        if name := _name(tool):
            yield f'tools[{number}]', tool, name
    for place, message in enumerate(messages):
        calls = message.get('tool_calls')
        for number, call in enumerate(calls if isinstance(calls, list | tuple) else ()):
            if name := _name(call):
                yield f'messages[{place}].tool_calls[{number}]', call, name


def _name(tool: object) -> str:
    """The name of a tool or a call in the form of OpenAI's chat, or of a bare function; '' = no name."""
    function: object = tool.get('function', tool) if isinstance(tool, Mapping) else None
    name = function.get('name') if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ''


def describe_untold(fields: Mapping[str, Sequence[str]]) -> str:
    """The sentence that refuses a run before it begins: its config names tools that no prompt would show.

    Args:
      fields: fields of the config, with their values; the sentence is '' if all are empty.
    """
    return next((f'{field}={tuple(values)!r} {NO_PLACE}' for field, values in fields.items() if values), '')
