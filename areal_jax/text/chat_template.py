"""Chat templates: from the messages of a conversation to the text of its prompt."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.files import JsonObject

Messages = Sequence[Mapping[str, object]]  # {'role': 'system' | 'user' | 'assistant' | 'tool', 'content': text, ...}
Tools = Sequence[JsonObject]  # {'type': 'function', 'function': {'name': ..., ...}}, as OpenAI's chat has them

_RENDERER = pathlib.Path(__file__).with_name('template_renderer.py')
_LARGEST_SOURCE = 2**18  # characters; the templates of known models have less than 2**15
# Limits of the output in characters: per call, per conversation, and per character of the messages.
_CHARACTERS, _CHARACTERS_EACH, _CHARACTERS_PER_CHARACTER = 2**20, 2**14, 16
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


class ChatTemplate:
    """A jinja2 template that came with the weights, from outside.

    It runs in jinja2's sandbox, in a process that is started for each call of `render` and ends with it. That process
    has at most `cpu_seconds` of CPU time and one more for every 500 conversations, 1 GiB of memory besides its input
    and output, and it may write 2**20 characters, and for each conversation 2**14 and 16 times the length of its
    messages. So a template that loops, allocates or recurses without end costs seconds and an error, never this
    process. A call takes about 0.1 s, a conversation about 50 microseconds.

    Args:
      source: of the template, in jinja2.
      values: what it sees besides messages and add_generation_prompt=True, e.g. bos_token; JSON-able.
      place: the file that it comes from, for errors.

    Raises TokenizerError for a source that cannot be parsed.
    """

    def __init__(self, source: object, values: JsonObject, place: str, cpu_seconds: int = _CPU_SECONDS):
        self._source, self._values, self._place, self._cpu_seconds = source, dict(values), place, cpu_seconds
        if not isinstance(source, str):
            raise TokenizerError(f'{place}: the chat template is a {type(source).__name__}, not a text')
        if len(source) > _LARGEST_SOURCE:
            raise TokenizerError(
                f'{place}: the chat template has {len(source)} characters, more than {_LARGEST_SOURCE}; is it one?'
            )
        self.takes_tools = _parse(source, place)  # whether it reads `tools`

    def render(self, conversations: Sequence[Messages], tools: Tools = ()) -> list[str]:
        """The prompt of each conversation, up to where the answer begins; raises ConversationError."""
        if not conversations:
            return []
        cpu_seconds = self._cpu_seconds + len(conversations) // _CONVERSATIONS_PER_CPU_SECOND
        messages = [[dict(message) for message in conversation] for conversation in conversations]
        length = sum(len(str(text)) for conversation in messages for m in conversation for text in m.values())
        length += len(conversations) * len(str(tools))
        characters = _CHARACTERS + _CHARACTERS_EACH * len(messages) + _CHARACTERS_PER_CHARACTER * length
        request = {
            'source': self._source,
            'values': self._values | ({'tools': list(tools)} if tools else {}),
            'conversations': messages,
            'characters': characters,
            'memory_bytes': _MEMORY_BYTES + 16 * length + 4 * characters,
            'cpu_seconds': cpu_seconds,
        }
        replies, ended = _run(request)
        texts = [reply['text'] for reply in replies if 'text' in reply]
        if len(texts) == len(conversations):
            return texts
        reason = replies[-1].get('error', '') if replies else ''
        reason = reason.rstrip('.') or ended
        raise ConversationError(
            len(texts), f'{self._place}: the chat template gives no prompt: {reason}. Use the template of the model'
        )


def _parse(source: str, place: str) -> bool:
    """Whether the template reads `tools`; raises TokenizerError."""
    from jinja2 import TemplateSyntaxError, nodes

    from areal_jax.text.template_renderer import make_environment

    try:
        # Parsing evaluates nothing. Compiling would: jinja2 computes constant expressions.
        names = make_environment().parse(source).find_all(nodes.Name)
        return any(name.name == 'tools' and name.ctx == 'load' for name in names)
    except TemplateSyntaxError as error:
        raise TokenizerError(f'{place}: the chat template cannot be read: line {error.lineno}: {error}') from error
    except RecursionError as error:
        raise TokenizerError(f'{place}: the chat template cannot be read: it is nested too deep') from error


def _run(request: JsonObject) -> tuple[list[dict[str, str]], str]:
    """(the lines that the process wrote, how it ended)."""
    cpu_seconds = request['cpu_seconds']
    wall_seconds = cpu_seconds * _WALL_SECONDS_PER_CPU_SECOND
    command = [sys.executable, '-P', str(_RENDERER)]  # -P: no module of this directory hides one of a library
    text = json.dumps(request).encode()
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=wall_seconds, check=False)
        written, ended = done.stdout, _describe_end(done.returncode, done.stderr, cpu_seconds)
    except subprocess.TimeoutExpired as error:
        written, ended = error.stdout or b'', f'it takes more than {wall_seconds} s'
    lines = written.split(b'\n')[:-1]  # the last one is empty, or was cut
    return [json.loads(line) for line in lines], ended


def _describe_end(status: int, said: bytes, cpu_seconds: int) -> str:
    if status in (-signal.SIGXCPU, -signal.SIGKILL):  # SIGXCPU at the limit, SIGKILL a moment later
        return f'it takes more than {cpu_seconds} s of CPU time'
    last_line = said.decode(errors='replace').strip().rpartition('\n')[2]
    return f'the process that renders it ended with status {status}: {last_line[:300]}'
