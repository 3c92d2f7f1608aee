"""Describes the end of a program in a sentence without keys."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping

from areal_jax.agents.programs.program_supervisor import TAIL_BYTES
from areal_jax.workers.worker_process import name_signal

_SECRET = re.compile(r'.*_(KEY|TOKEN)')  # names of variables
_LONGEST_LINE, _LONGEST = 300, 500  # characters


def find_secrets(environment: Mapping[str, str]) -> list[str]:
    """The values that must not be shown: of variables whose names end in _KEY or _TOKEN."""
    return [value for name, value in environment.items() if value and _SECRET.fullmatch(name)]


def hide_secrets(text: str, secrets: Collection[str]) -> str:
    """Replaces each secret in the text by '***'."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, '***')
    return text


def describe_exit(exit_code: int, output: bytes, secrets: Collection[str]) -> str:
    """'it ended with exit code 1; its last line: ValueError: no digits (line 3 of agent.py)'.

    Args:
      exit_code: if negative, the signal that killed the program.
      output: the end of the output, at most TAIL_BYTES.
    """
    text = output.decode(errors='replace')
    if len(output) >= TAIL_BYTES:  # it may begin within a secret
        ends = (secret[start:] for secret in secrets for start in range(1, len(secret)))
        text = text.removeprefix(max(filter(text.startswith, ends), key=len, default=''))
    lines = [line for line in hide_secrets(text, secrets).splitlines() if line.strip()]
    said = f'; its last line: {shorten(lines[-1], _LONGEST_LINE)}' if lines else ''
    places = re.findall(r'^  File "([^"\n]+)", line (\d+)', '\n'.join(lines), re.MULTILINE)
    if places and exit_code == 1:  # of a traceback
        said += f' (line {places[-1][1]} of {places[-1][0]})'
    return shorten(f'{_describe_code(exit_code)}{said}', _LONGEST)


def shorten(text: str, most: int = _LONGEST) -> str:
    """The text in one line of at most `most` characters."""
    line = ' '.join(text.split())
    return line if len(line) <= most else f'{line[: most - 3]}...'


def _describe_code(exit_code: int) -> str:
    if exit_code >= 0:
        return f'it ended with exit code {exit_code}'
    by_kernel = ', which the kernel sends where memory runs out' if exit_code == -signal.SIGKILL else ''
    return f'it was killed by {name_signal(-exit_code)}{by_kernel}'
