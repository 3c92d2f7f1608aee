"""Renders one chat template in a separate process, which template_worker.py starts. Imports only jinja2.

A template sees and can call the same names as in transformers, so that a prompt is like the ones of the training. The
argument is the pid of the parent; this process ends when the parent does. stdin: a JSON line for each call,
{conversations, values, day, characters, memory_bytes, cpu_seconds, wall_seconds}, in the first one also {source}.
stdout: a JSON line for each conversation, in order, {"text": ...}, or {"error": ...} for the first one that fails, and
an empty line after the last one. If a limit is exceeded, the process ends without the empty line.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REASONING = ('reasoning_content', 'thinking', 'reasoning')  # names under which programs send it
_LONGEST_ERROR = 300  # characters of an error message that are kept

_Request = dict  # of JSON
_TIMERS = ('cpu_seconds', signal.ITIMER_PROF), ('wall_seconds', signal.ITIMER_REAL)


class _RefusedMessagesError(Exception):
    """Raised if the template called raise_exception."""


def main() -> None:
    """Answers calls until the parent closes stdin or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C reaches the group, and is for the parent
    limit_core()
    source, template = '', None
    for request in _read_requests(int(sys.argv[1])):
        source = request.get('source', source)
        try:
            limit_call(request)
            template = template or make_environment(request['day']).from_string(source)
            _answer(template, request)
        except MemoryError:
            _write({'error': f'it needs more than {request["memory_bytes"] >> 20} MiB of memory'})
            return
        except Exception as error:
            _write({'error': _describe(error)})
        _end_call()


def limit_core() -> None:
    """Disables core dumps: a process that is killed at a limit leaves no file."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_call(request: _Request) -> None:
    """Makes allocations beyond `memory_bytes` raise MemoryError; beyond its seconds the kernel ends the process.

    The timers count the seconds of this call alone; RLIMIT_CPU would count the seconds of the process.
    """
    import resource

    with contextlib.suppress(ValueError, OSError):  # the hard limit is lower, or the platform has none
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (request['memory_bytes'], hard))
    for name, timer in _TIMERS:
        signal.setitimer(timer, request[name])


def make_environment(day: str = '') -> ImmutableSandboxedEnvironment:
    """The sandbox with the block settings and the functions that chat templates are written for.

    Args:
      day: the date that `strftime_now` gives: '2026-11-30', or 'off' = no such function; '' = the present time.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols', _Generation]
    )
    environment.filters['tojson'] = _to_json  # jinja's own escapes for HTML
    environment.globals['raise_exception'] = _refuse_messages
    if day != 'off':
        environment.globals['strftime_now'] = lambda form: _tell_time(day).strftime(form)
    return environment


class _Generation(Extension):
    """Allows {% generation %} ... {% endgeneration %} around the model's text: only the text between is written."""

    tags: ClassVar[set[str]] = {'generation'}  # type: ignore[misc]

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method('_give'), [], [], body).set_lineno(line)

    def _give(self, caller: Callable[[], str]) -> str:
        return caller()


def render(template: jinja2.Template, values: dict[str, object], messages: list[object], characters: int) -> str:
    """The text of one conversation; raises ValueError once it has more than `characters` characters."""
    parts, length = [], 0
    for part in template.generate(values, messages=[*map(_complete, messages)], add_generation_prompt=True):
        length += len(part)
        if length > characters:
            raise ValueError(f'its text has more than the {characters} characters that are left for it')
        parts.append(part)
    return ''.join(parts)


def _read_requests(parent: int) -> Iterator[_Request]:
    """Yields the parent's requests, until it closes stdin or ends."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    # A fork of the parent keeps the other end of stdin open, so an open stdin does not mean that the parent lives.
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or older than 5.3
        poller.register(os.pidfd_open(parent), select.POLLIN)
    while os.getppid() == parent and all(number == 0 for number, _ in poller.poll()):
        line = sys.stdin.buffer.readline()
        if not line.endswith(b'\n'):
            return
        yield json.loads(line)


def _answer(template: jinja2.Template, request: _Request) -> None:
    left = request['characters']
    for messages in request['conversations']:
        text = render(template, request['values'], messages, left)
        left -= len(text)
        _write({'text': text})


def _end_call() -> None:
    for _, timer in _TIMERS:
        signal.setitimer(timer, 0)
    sys.stdout.write('\n')
    sys.stdout.flush()


def _complete(message: Any) -> Any:
    """The message without fields that have no value, and with its reasoning under the names that templates read."""
    if not isinstance(message, dict):
        return message
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = [found[name] for name in _REASONING if name in found][:1]
    return {'thinking': reasoning[0], **found, 'reasoning_content': reasoning[0]} if reasoning else found


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _tell_time(day: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(day) if day else datetime.datetime.now()


def _refuse_messages(reason: str) -> NoReturn:
    raise _RefusedMessagesError(reason)


def _describe(error: Exception) -> str:
    text = ' '.join(str(error).split())
    if len(text) > _LONGEST_ERROR:
        text = f'{text[:_LONGEST_ERROR]}...'
    if isinstance(error, _RefusedMessagesError):
        return f'it refuses the messages: {text}'
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


def _write(reply: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(reply) + '\n')
    sys.stdout.flush()


if __name__ == '__main__':
    main()
