"""Chat templates: from the messages of a conversation to the text of its prompt."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.text.template_worker import TemplateWorker

Messages = Sequence[Mapping[str, object]]  # {'role': 'system' | 'user' | 'assistant' | 'tool', 'content': text, ...}
Tools = Sequence[JsonObject]  # {'type': 'function', 'function': {'name': ..., ...}}, as OpenAI's chat has them

_LARGEST_SOURCE = 2**18  # characters; the templates of known models have less than 2**15
# Limits of the output in characters: per call, per conversation, and per character of the messages.
_CHARACTERS, _CHARACTERS_EACH, _CHARACTERS_PER_CHARACTER = 2**20, 2**14, 16
_LARGE = 2**16  # characters of a conversation with its tools
_MEMORY_BYTES = 2**30  # besides input and output, whose bounds are above
_CPU_SECONDS, _CONVERSATIONS_PER_CPU_SECOND = 10, 500  # one takes about 50 microseconds
_WALL_SECONDS_PER_CPU_SECOND = 30  # the process may have to wait for the CPU


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be built, or that does not fit its text or its model."""


class ConversationError(TokenizerError):
    """The first of several conversations that has no prompt.

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

    It runs in jinja2's sandbox, in a process that the first call of `render` starts and that answers the later ones;
    see TemplateWorker for its end. A call has at most `cpu_seconds` of CPU time and one more for every 500
    conversations, 1 GiB of memory besides its input and output, and it may write 2**20 characters, and for each
    conversation 2**14 and 16 times the length of its messages. So a template that loops, allocates or recurses without
    end costs seconds and an error, never this process. The first call takes about 0.1 s, a conversation about 50
    microseconds.

    Args:
      source: of the template, in jinja2.
      values: what it sees besides messages and add_generation_prompt=True, e.g. bos_token; JSON-able.
      place: the file that it comes from, for errors.
      day: that its `strftime_now` gives: '2026-11-30', or 'off' = it has none; '' = the present time.
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
        # whatever it, or the one for tools, looks at by name
        self.names: frozenset[str] = names if with_tools is None else names | with_tools.names
        self.takes_tools: bool = 'tools' in variables if with_tools is None else with_tools.takes_tools
        self._workers = [TemplateWorker(source), TemplateWorker(source)]  # of usual requests, and of large ones

    def render(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[str]:
        """The prompt of each conversation, up to where the answer begins; threads take turns.

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
        """All that it may write besides its values: its source, and that of the template for tools."""
        return self.source if self._with_tools is None else self.source + self._with_tools.source

    def _find_worker(self, request: JsonObject) -> TemplateWorker:
        """A large conversation takes its time, and the others do not wait for it."""
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
    """Names that the template looks at: all, as attributes and texts too, and its variables; raises TokenizerError."""
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
