"""Renders chat templates in a separate process, which chat_template.py starts and limits. Imports jinja2 alone.

stdin: one JSON object {source, values, conversations, characters, memory_bytes, cpu_seconds}. stdout: a JSON line for
each conversation in their order, {"text": ...}, or {"error": ...} for the first one that fails, which ends the process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST_ERROR = 300  # characters of an error message that are kept


class _RefusedMessagesError(Exception):
    """The template called raise_exception."""


def main() -> None:
    """Render the conversations of the request on stdin."""
    request = json.load(sys.stdin)
    limit_process(request['memory_bytes'], request['cpu_seconds'])
    left = request['characters']
    try:
        template = make_environment().from_string(request['source'])
        for messages in request['conversations']:
            text = render(template, request['values'], messages, left)
            left -= len(text)
            _write({'text': text})
    except MemoryError:
        _write({'error': f'it needs more than {request["memory_bytes"] >> 20} MiB of memory'})
    except Exception as error:
        _write({'error': _describe(error)})


def limit_process(memory_bytes: int, cpu_seconds: int) -> None:
    """Beyond `memory_bytes` allocations raise MemoryError; beyond `cpu_seconds` the kernel kills the process."""
    import resource

    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_seconds)):
        with contextlib.suppress(ValueError, OSError):  # a hard limit is lower, or the platform has no such limit
            resource.setrlimit(kind, (limit, limit))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with the block settings and the functions that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols']
    )
    environment.filters['tojson'] = _to_json  # jinja's own escapes for HTML
    environment.globals['raise_exception'] = _refuse_messages
    return environment


def render(template: jinja2.Template, values: dict[str, object], messages: list[object], characters: int) -> str:
    """The text of one conversation; raises ValueError once it has more than so many characters."""
    parts, length = [], 0
    for part in template.generate(values, messages=messages, add_generation_prompt=True):
        length += len(part)
        if length > characters:
            raise ValueError(f'its text has more than the {characters} characters that are left for it')
        parts.append(part)
    return ''.join(parts)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


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
